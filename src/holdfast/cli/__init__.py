"""The command line, ``holdfast COMMAND``: one module a command, gathered by ``app``. Torch-free until one runs."""
