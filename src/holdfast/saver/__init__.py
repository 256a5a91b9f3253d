"""The save pipeline, from the call of `save` to the published checkpoint.

Start reading in `saver`: snapshot (training thread) -> `stager` (agree, plan, copy) -> `delivery` (persist, commit).
"""
