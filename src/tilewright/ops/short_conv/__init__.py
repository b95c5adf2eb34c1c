"""A short causal convolution over time, with one filter per channel. The public functions are in `api`."""
