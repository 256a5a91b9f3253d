"""Loading a state: from Holdfast's own directories, stock DCP and Hugging Face directories.

Start in `loader`; `sources` says where bytes come from, `resume` which step to take.
"""
