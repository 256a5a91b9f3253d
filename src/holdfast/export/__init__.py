"""Hugging Face exports: which tensors a directory of them has, where their bytes come from, and who writes which."""
