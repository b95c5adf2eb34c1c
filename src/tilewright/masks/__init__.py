"""Masks as values: which query attends to which key, without an array of T x S.

    from tilewright import masks
    mask = masks.Causal() & masks.SlidingWindow(1023, None)

The masks are in library.py, `&`, `|` and `~` in algebra.py, and the blocks that a kernel visits in block_list.py.
"""

from tilewright.masks.algebra import Mask as Mask
from tilewright.masks.block_list import Grid as Grid
from tilewright.masks.library import BlockSparse as BlockSparse
from tilewright.masks.library import Causal as Causal
from tilewright.masks.library import Dense as Dense
from tilewright.masks.library import Dilated as Dilated
from tilewright.masks.library import MaskFn as MaskFn
from tilewright.masks.library import PerHead as PerHead
from tilewright.masks.library import Prefix as Prefix
from tilewright.masks.library import Segments as Segments
from tilewright.masks.library import SlidingWindow as SlidingWindow
