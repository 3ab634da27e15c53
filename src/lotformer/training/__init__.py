"""Training: what every loop shares."""
