"""Queries through the keys' expansion of multi-head latent attention, and outputs through the values', per head."""
