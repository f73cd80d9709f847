"""Generation in which every token is produced by freshly patched weights."""
