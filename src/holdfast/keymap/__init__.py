"""Map each tensor to another format: renamed, cut, joined, transposed, converted.

`rules` are what users write, `tracing` turns adapters into `moves`, which can be read backwards.
"""
