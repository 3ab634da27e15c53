"""Data sets and batches: readers of the sets' own public layouts."""
