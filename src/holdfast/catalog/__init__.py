"""List what a root directory holds, put it in order, and decide what may go.

Start in `root` (names and layout), `listing` (which checkpoints are there), `retention` (pure: their order, and
which to keep) and `catalog` (retention and pins applied, what to resume from). Torch-free.
"""
