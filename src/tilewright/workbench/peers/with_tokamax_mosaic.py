"""tokamax's `ragged_dot` in Mosaic GPU."""

import functools

from tilewright.workbench.peers.with_jax_dot import grouped_by
from tilewright.workbench.peers.with_tokamax_triton import DISTRIBUTIONS as DISTRIBUTIONS
from tilewright.workbench.peers.with_tokamax_triton import ragged_dot
from tilewright.workbench.peers.with_tokamax_triton import unavailable as unavailable

OPS = {"grouped_matmul": grouped_by(functools.partial(ragged_dot, implementation="mosaic"))}
