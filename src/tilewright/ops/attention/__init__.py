"""Softmax attention: over whole sequences, over a cache, and over the pages of a cache."""
