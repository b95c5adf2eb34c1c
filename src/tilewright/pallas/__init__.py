"""The kernel toolkit: what Pallas kernels of any op share. It knows no op."""
