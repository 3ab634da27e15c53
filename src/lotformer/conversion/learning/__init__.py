"""Teach converted models: calibration and fine-tuning."""
