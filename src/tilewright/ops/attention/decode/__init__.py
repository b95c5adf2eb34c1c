"""Attention of a few queries over a cache: in one piece, or in pages."""
