"""Places that keep files: local directories and object stores, behind one protocol; locks, leases, reads.

To add one, implement `protocol` and run the conformance suite of `holdfast.testing`. Torch-free.
"""
