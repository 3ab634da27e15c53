"""Image classification as a task of the training loop."""
