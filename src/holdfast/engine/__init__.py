"""The process that writes, hashes and syncs files beside the trainer, and the client that starts and uses it.

In the trainer: `client`, `supervisor`. In the engine: `process` (control loop), `write_job` (one attempt), `executor`
(writer threads), `checksums`. Shared: `messages`, `wire`. Torch-free.
"""
