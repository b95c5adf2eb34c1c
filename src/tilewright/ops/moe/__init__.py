"""Mixture of experts around `grouped_matmul`: routing, sorting rows by expert and back, losses of the router.

The public functions are in `api`. They are plain JAX functions without implementations to choose from, as `rope_tables`
is: they move rows and reduce over experts at the memory's speed, and the products are `grouped_matmul`'s.
"""
