"""Bytes and their meaning; no I/O.

`manifest` and `structure` describe a checkpoint, `torch_record` and `safetensors` a tensor file, `dcp_metadata` what
stock DCP reads, `objects` and `pickles` plain Python values. Torch-free, but for `objects` and `dcp_metadata`.
"""
