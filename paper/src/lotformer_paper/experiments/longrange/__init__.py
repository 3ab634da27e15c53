"""The Long Range Arena: a task of the training loop, the paper's Table 2, and training throughput."""
