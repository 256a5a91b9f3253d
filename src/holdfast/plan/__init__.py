"""Assign parts of tensors to ranks and files, for writing and reading. Pure and torch-free."""
