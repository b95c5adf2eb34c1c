"""Attention of one token per sequence over a cache of latents, which are keys and values at once."""
