"""Translation: train an encoder–decoder, translate with it, and the paper's Table 5."""
