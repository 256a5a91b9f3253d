"""Conformance suites and drivers for authors of storages, and for driving an engine without a saver."""
