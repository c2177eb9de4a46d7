"""From a data file to batches that are a pure function of (seed, step)."""
