"""The long-range encoder, and translation on transformers' Marian."""
