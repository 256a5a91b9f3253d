"""Adapt weight sync to frameworks with their own interface for it: one module each, which imports it lazily."""
