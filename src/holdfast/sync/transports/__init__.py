"""Transports of weight versions, one per module."""
