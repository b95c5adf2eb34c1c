"""Tilewright: JAX kernels for TPU and GPU, and the bench they are made on."""

from tilewright.core.dispatch import Unsupported as Unsupported
from tilewright.core.dispatch import explain as explain
from tilewright.core.target import interpret as interpret
from tilewright.core.target import target as target
from tilewright.core.version import __version__ as __version__

# Every public op, a line each. This is also what registers an op with the workbench.
from tilewright.ops.linear_cross_entropy.api import linear_cross_entropy as linear_cross_entropy
