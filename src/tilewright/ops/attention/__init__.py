"""Softmax attention: over whole sequences, over a cache, over pages of a cache."""
