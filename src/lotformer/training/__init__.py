"""Training: one loop for calibration, fine-tuning and training from scratch."""
