"""The queries of one token per sequence, and the caches with its keys and values in them."""
