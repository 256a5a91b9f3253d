"""Versions in blocks of memory that receivers read where they lie, each at its own pace."""
