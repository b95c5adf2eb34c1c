"""The queries of one token per sequence, and the cache with its latent in it, for multi-head latent attention."""
