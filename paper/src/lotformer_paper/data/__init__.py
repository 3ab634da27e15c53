"""The data sets of the experiments: readers and generators."""
