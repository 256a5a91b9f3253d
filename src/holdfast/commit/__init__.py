"""Publish an attempt as a checkpoint on every rank or none; recover what a crash left."""
