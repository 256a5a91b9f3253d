"""The formats and places that a load reads from; `open` chooses by what it finds."""
