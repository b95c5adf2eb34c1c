"""What is compared: the layers at one size, and the size of the comparison for each kind of device."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import tilewright
from delta_attention_comparison.recall import Budget, Task
from tilewright.core.case import Case, Input, Work
from tilewright.core.dispatch import Decision, Op
from tilewright.layers import Attention, DeltaNet, KimiDeltaAttention, Qwen3NextGatedDeltaNet

LAYERS = ("kda", "gdn", "deltanet", "softmax")
TITLES = {
    "kda": "KimiDeltaAttention",
    "gdn": "Qwen3NextGatedDeltaNet",
    "deltanet": "DeltaNet",
    "softmax": "Attention",
}
# The op that mixes tokens in each layer: its numerics are checked, and it dominates the time of a layer.
OPS = {"kda": "kda", "gdn": "gated_delta_rule", "deltanet": "delta_rule", "softmax": "flash_attention"}


@dataclass(frozen=True)
class Preset:
    """The size of a comparison."""

    d_model: int
    num_heads: int
    head_dim: int
    batch: int
    dtype: str
    seq_lens: tuple[int, ...]
    seconds: float
    """Steady-state time per entry."""
    check_cases: int
    """How many of an op's small cases are checked, those with the most tokens first."""
    check_dtypes: tuple[str, ...]
    interpreted: bool
    """Whether kernels for other devices are checked too, in their interpreters."""
    task: Task
    budget: Budget
    speed_seconds: float | None = None
    """From the fifth length on, one is begun only while less than this has been spent on speed."""
    compile_workers: int = 1
    """How many programs are compiled at a time. XLA compiles a program for a CPU in one thread."""
    recall_implementation: str | None = None


_LARGE = Preset(
    d_model=2048,
    num_heads=16,
    head_dim=128,
    batch=1,
    dtype="bfloat16",
    seq_lens=(1024, 2048, 4096, 8192, 16384, 32768),
    seconds=1.0,
    check_cases=2,
    check_dtypes=("float32", "bfloat16"),
    interpreted=False,
    task=Task(pairs=(4, 8, 16, 32), keys=64, values=64),
    # 1,500 steps with heads of 16 channels and up to 64 pairs were too few for all but DeltaNet (H200, one seed).
    budget=Budget(
        steps=3000,
        rows=128,
        d_model=128,
        num_heads=2,
        head_dim=32,
        parameters=400_000,
        learning_rate=3e-3,
        test_rows=512,
    ),
)
PRESETS: Mapping[str, Preset] = {
    # For 2 cores and 3 minutes, of which the compiler takes most: few lengths, and a task that a small model learns in
    # seconds. Four lengths fit; the longer ones are for faster machines.
    "cpu": Preset(
        d_model=64,
        num_heads=1,
        head_dim=64,
        batch=1,
        dtype="float32",
        seq_lens=(256, 512, 1024, 2048, 4096, 8192),
        seconds=0.2,
        speed_seconds=60.0,
        compile_workers=2,
        check_cases=1,
        check_dtypes=("float32",),
        interpreted=False,
        task=Task(pairs=(2, 4, 8), keys=16, values=16),
        budget=Budget(),
        # A row is shorter than a chunk, so the recurrence does less work, and it compiles in less time.
        recall_implementation="reference",
    ),
    "gpu": _LARGE,
    "tpu": _LARGE,
    "full": dataclasses.replace(
        _LARGE,
        seq_lens=(*_LARGE.seq_lens, 65536, 131072),
        seconds=3.0,
        check_cases=99,
        interpreted=True,
        budget=dataclasses.replace(_LARGE.budget, steps=10_000),
    ),
}


def make_layer(name: str, d_model: int, num_heads: int, head_dim: int) -> Any:
    """The layer of that name; all of them have the same number of heads and channels."""
    if name == "kda":
        return KimiDeltaAttention(d_model=d_model, num_heads=num_heads, head_dim=head_dim)
    if name == "gdn":
        return Qwen3NextGatedDeltaNet(
            d_model=d_model, num_key_heads=num_heads, num_value_heads=num_heads, key_dim=head_dim, value_dim=head_dim
        )
    if name == "deltanet":
        return DeltaNet(d_model=d_model, num_heads=num_heads, key_dim=head_dim, value_dim=head_dim)
    return Attention(d_model=d_model, num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim)


def own_decision(
    name: str, layer: Any, shape: tuple[int, ...], dtype: str, implementation: str | None = None
) -> Decision:
    """The decision for the op that mixes the layer's tokens, for x of this shape."""
    weights = jax.eval_shape(layer.init, jax.random.key(0))
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    decisions = tilewright.explain(layer.apply, weights, x, implementation=implementation).decisions
    return next(decision for decision in decisions if decision.op == OPS[name])


@dataclass(frozen=True)
class LayerOp(Op):
    """A layer as an op of the workbench: a function of named arrays, which are x and the weights."""

    layer: Any = None

    @property
    def function(self) -> Any:
        structure = jax.tree.structure(jax.eval_shape(self.layer.init, jax.random.key(0)))

        def apply(x: jax.Array, *, implementation: str | None, config: Any, **weights: jax.Array) -> jax.Array:
            del config
            held = jax.tree.unflatten(structure, [weights[f"w{i}"] for i in range(len(weights))])
            return self.layer.apply(held, x, implementation=implementation)[0]

        return apply


@functools.cache
def _initial_weights(layer: Any) -> tuple[jax.Array, ...]:
    """The leaves of a layer's weights, which are the same for every length."""
    return tuple(jax.tree.leaves(layer.init(jax.random.key(0))))


@functools.cache
def layer_op(name: str, preset: Preset, t: int) -> tuple[LayerOp, Case, Decision]:
    """A layer over t tokens for `compile_case`, and the decision for the op that mixes its tokens."""
    layer = make_layer(name, preset.d_model, preset.num_heads, preset.head_dim)
    leaves = _initial_weights(layer)
    shape = (preset.batch, t, preset.d_model)
    decision = own_decision(name, layer, shape, preset.dtype)

    def drawn(leaf: jax.Array) -> Any:
        return lambda key, shape: leaf

    inputs = {"x": Input(shape)} | {f"w{i}": Input(leaf.shape, drawn(leaf)) for i, leaf in enumerate(leaves)}
    parameters = sum(leaf.size for leaf in leaves)
    tokens, channels = preset.batch * t, preset.num_heads * preset.head_dim
    # A causal token attends to half of the sequence on average, with one product for the logits and one for the values.
    mixing = 2.0 * t * channels if name == "softmax" else 6.0 * preset.head_dim * channels
    flops = tokens * (2.0 * parameters + mixing)

    def work(itemsize: int) -> Work:
        return Work(flops, float(itemsize * (2 * tokens * preset.d_model + parameters)))

    def work_grad(itemsize: int) -> Work:
        return Work(3 * flops, 3 * work(itemsize).bytes)

    op = LayerOp(name=TITLES[name], family="", implementations=(decision.implementation,), layer=layer)
    return op, Case(TITLES[name], f"t{t}", inputs, ("y",), work, work_grad), decision
