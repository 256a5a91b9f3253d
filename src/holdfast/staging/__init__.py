"""Copies tensors into host memory that the engine writes from: images, their layout, copy scheduling."""
