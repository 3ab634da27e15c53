"""Survival of real checkpoints: a vision transformer, a retriever, a translator; one protocol for all."""
