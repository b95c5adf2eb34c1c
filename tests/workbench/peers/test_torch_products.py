"""The products of the torch adapter, with a torch that is made up of numpy: layouts, scales, offsets, refusals."""

import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tilewright.core.dispatch import find_op
from tilewright.workbench.peers import with_torch

pytestmark = pytest.mark.slow


class Tensor(np.ndarray):
    """The methods of a torch tensor that the adapter calls."""

    rows: int

    def t(self) -> Any:
        return self.T

    def contiguous(self) -> Any:
        return np.ascontiguousarray(self).view(Tensor)

    def new_zeros(self, shape: tuple[int, ...]) -> Any:
        return np.zeros(shape, self.dtype).view(Tensor)

    def to(self, dtype: Any) -> Any:
        return self.astype(dtype)

    def steps(self) -> tuple[int, ...]:
        """Strides in elements, as torch counts them."""
        return tuple(stride // self.itemsize for stride in self.strides)


class Quantized(NamedTuple):
    stored: Tensor
    scales: Tensor
    dtype: str
    layout: str


def tensor(x: Any) -> Any:
    if isinstance(x, tilewright.QuantizedArray):
        return Quantized(tensor(x.stored), tensor(x.scales), x.dtype, x.layout)
    return np.array(x).view(Tensor)


def scaled_mm(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: str, use_fast_accum: bool) -> Any:
    """What torch asks for: a by rows, b by columns; scales by columns, those of b a multiple of 4 apart."""
    (m, k), n = a.shape, b.shape[1]
    assert (a.steps(), b.steps()) == ((k, 1), (1, k))
    assert (scale_a.shape, scale_a.steps()) == ((m, k // 128), (1, m))
    assert scale_b.shape == (k // 128, n // 128)
    assert scale_b.steps() == (1, -(-k // 128 // 4) * 4)
    assert (out_dtype, use_fast_accum) == ("torch.bfloat16", False)
    rows = np.asarray(a, np.float32) * np.repeat(scale_a, 128, axis=1)
    columns = np.asarray(b, np.float32) * np.repeat(np.repeat(scale_b, 128, axis=0), 128, axis=1)
    return np.asarray(rows) @ np.asarray(columns)


def grouped_mm(x: Any, w: Any, *, offs: Any) -> Any:
    assert offs.dtype == np.int32
    starts = [0, *offs[:-1]]
    return np.concatenate([x[a:b] @ w[g] for g, (a, b) in enumerate(zip(starts, offs, strict=True))])


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = SimpleNamespace(_scaled_mm=scaled_mm, _grouped_mm=grouped_mm, bfloat16="torch.bfloat16")
    monkeypatch.setitem(sys.modules, "torch", made_up)
    monkeypatch.setattr(with_torch, "_activated", lambda z, activation: z)


def run(op: str, case: str, dtype: str = "float32") -> tuple[Any, dict[str, Any]]:
    """The adapter's result for a case, its arrays in the adapter's layouts; and the case's arrays."""
    arrays = find_op(op).case(case).draw(dtype)
    layouts = with_torch.LAYOUTS[op]
    theirs = {name: layouts[name][0](tensor(x)) if name in layouts else tensor(x) for name, x in arrays.items()}
    return with_torch.OPS[op](**theirs)[0], arrays


def test_scaled_mm_is_the_product_of_blocks(torch: None) -> None:
    y, arrays = run("matmul", "float8_float8")
    want = tilewright.matmul(**arrays, out_dtype=jnp.float32, implementation="reference")
    np.testing.assert_allclose(y, want, rtol=2e-5, atol=1e-4)


def test_grouped_mm_takes_the_ends_of_groups(torch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = find_op("grouped_matmul").case("many_groups").draw("float32")
    x, w, ends = tensor(arrays["x"]), tensor(arrays["w"]), with_torch._ends(tensor(arrays["group_sizes"]))
    assert ends.rows == x.shape[0]
    bfloat16 = SimpleNamespace(shape=x.shape, dtype="torch.bfloat16", __getitem__=x.__getitem__)
    monkeypatch.setattr(sys.modules["torch"], "_grouped_mm", lambda _, w, *, offs: grouped_mm(x, w, offs=offs))
    (y,) = with_torch.OPS["grouped_matmul"](bfloat16, w, ends)
    np.testing.assert_allclose(y, tilewright.grouped_matmul(**arrays), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("op", "case", "reason"),
    [
        ("matmul", "int8", "torch has no product of float activations with quantised weights"),
        ("matmul", "int8_int8", "torch._scaled_mm takes float8, and this is int8"),
        ("grouped_matmul", "float8", "torch has no grouped product with a scale per block"),
        ("grouped_matmul", "many_groups", "torch._grouped_mm takes bfloat16, and x is float32"),
    ],
)
def test_what_torch_has_not_is_refused(torch: None, op: str, case: str, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        run(op, case)
