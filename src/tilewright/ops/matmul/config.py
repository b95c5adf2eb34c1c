"""Block sizes of matrix products."""
