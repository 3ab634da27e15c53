"""Measurements of a conversion: outputs before and after, couplings, embeddings."""
