"""Image classification: training, evaluation and the paper's ablations of vision models."""
