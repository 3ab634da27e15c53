"""Sentence pairs: readers of public layouts, cleaning, a joint vocabulary, batches by the number of tokens."""
