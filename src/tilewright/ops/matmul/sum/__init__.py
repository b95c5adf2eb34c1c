"""Sums of matrix products."""
