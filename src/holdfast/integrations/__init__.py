"""Plug Holdfast into training frameworks, one module a framework; each imports its framework when it is imported."""
