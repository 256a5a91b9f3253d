"""Weight versions: their tables, buckets, checksums and deltas, and how they are applied."""
