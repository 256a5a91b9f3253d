"""Implement the command line, ``holdfast COMMAND``: one module per command, collected by ``app``. Torch-free."""
