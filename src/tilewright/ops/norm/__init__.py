"""Norms over the last axis: RMS norm, layer norm, and RMS norm with a gate. The public functions are in `api`."""
