"""What a conversion changed: outputs before and after, couplings, embeddings."""
