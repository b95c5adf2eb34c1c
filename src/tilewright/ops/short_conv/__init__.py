"""A short causal convolution over time, a filter for each channel. The public functions are in `api`."""
