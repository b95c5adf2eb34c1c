"""Times whole language models with random weights of real shapes: a training step, reading a prompt, decoding.

- `train`: forward and backward pass, clipping and AdamW, as `tilewright train` does them: bfloat16 compute, float32 master
  weights. One document per row.
- `prefill`: reads a prompt into a new cache, as `Model.generate` does, up to the logits of the next token.
- `decode`: greedy tokens behind a full cache of so many tokens, in one program, as `Model.generate` runs them. A sample is
  the time of one token of every row.

FLOPs count each weight that a token meets once (of experts, those that are chosen), half of the attention's square, and
no recomputation; for training three times the forward pass. Bytes of a decoding step are every weight that some row needs,
the cache up to its length, and states read and written. A peer (transformers) runs in a process of its own, before ours:
JAX keeps the GPU memory that it once allocated.
"""

import dataclasses
import functools
import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.core.chip import Chip
from tilewright.core.target import default_device
from tilewright.layers.moe import MoE
from tilewright.models import generation
from tilewright.models.architecture import Architecture, initial_states
from tilewright.models.config import Config
from tilewright.models.loading import architecture_of, init
from tilewright.models.model import Model
from tilewright.models.prefix import CACHES, state_leaves
from tilewright.workbench.bench import Metrics, Timing, compiled_memory
from tilewright.workbench.peers.beside import answered
from tilewright.workbench.peers.registry import Peer
from tilewright.workbench.records import Provenance, Record
from tilewright.workbench.sampling import samples

What = Literal["train", "prefill", "decode"]
# Its random numbers are compiled in half of the time of the default's.
_KEYS = "rbg"
_NEW_TOKENS = 33
"""Tokens of a decoding call: 32 steps, and the first one, whose logits are given."""
_FOLDER = Path(__file__).resolve().parent / "peers"
_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
}
_KIMI = {
    "model_type": "kimi_linear",
    "vocab_size": 163_840,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "linear_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_EVERY_FOURTH = ("linear_attention", "linear_attention", "linear_attention", "full_attention")


def _qwen3(d: int, layers: int, heads: int, hidden: int, **changed: Any) -> dict[str, Any]:
    sizes = {"hidden_size": d, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": hidden}
    return {**_QWEN3, **sizes, **changed}


def _kimi(d: int, heads: int, hidden: int, kinds: tuple[str, ...], sparse: bool, **changed: Any) -> dict[str, Any]:
    return {
        **_KIMI,
        "hidden_size": d,
        "num_hidden_layers": len(kinds),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "linear_num_heads": heads,
        "intermediate_size": hidden,
        "layer_types": list(kinds),
        "mlp_layer_types": ["dense", *["sparse" if sparse else "dense"] * (len(kinds) - 1)],
        **changed,
    }


PRESETS: Mapping[str, dict[str, Any]] = {
    "tiny": _kimi(
        64,
        4,
        128,
        _EVERY_FOURTH,
        sparse=False,
        vocab_size=320,
        pad_token_id=0,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        linear_head_dim=16,
    ),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728),
    "qwen3-8b": _qwen3(4096, 36, 32, 12_288, tie_word_embeddings=False),
    "qwen3-30b-a3b": _qwen3(
        2048,
        48,
        32,
        6144,
        model_type="qwen3_moe",
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
    "kimi-linear-48b": _kimi(
        2304,
        32,
        9216,
        (*_EVERY_FOURTH * 6, "linear_attention", "linear_attention", "full_attention"),
        sparse=True,
        num_experts=256,
        num_experts_per_token=8,
        moe_intermediate_size=1024,
        num_shared_experts=1,
        routed_scaling_factor=2.446,
        tie_word_embeddings=False,
    ),
    "hybrid-1.5b": _kimi(2048, 16, 5376, _EVERY_FOURTH * 6, sparse=False, tie_word_embeddings=True),
}
"""The values of config.json by name. "hybrid-1.5b" is a dense model of Kimi Linear's shape, and "tiny" one for a CPU."""


@dataclass(frozen=True)
class Workload:
    """What is timed: so many rows of so many tokens. `decode` has them in the cache before it begins."""

    what: What
    batch: int
    tokens: int

    @staticmethod
    def parse(text: str) -> "Workload":
        """From "train:4x4096": 4 rows of 4,096 tokens."""
        found = re.fullmatch(r"(train|prefill|decode):(\d+)x(\d+)", text.strip())
        if found is None or not int(found[2]) or not int(found[3]):
            raise ValueError(
                f"--run {text!r} must be train, prefill or decode with rows and tokens, such as train:4x4096"
            )
        return Workload(found[1], int(found[2]), int(found[3]))  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"{self.what}:{self.batch}x{self.tokens}"

    @property
    def counted(self) -> int:
        """The tokens that a sample's time is for."""
        return self.batch if self.what == "decode" else self.batch * self.tokens


def default_workloads(preset: str) -> tuple[str, ...]:
    if preset == "tiny":
        return "train:2x64", "prefill:1x64", "decode:2x64"
    return "train:4x4096", "prefill:1x8192", "decode:1x1024", "decode:64x1024"


@dataclass(frozen=True)
class Subject:
    """The model that is timed, and how."""

    preset: str
    layers: int | None = None
    """The first layers only; None for all."""
    dtype: str = "bfloat16"
    quantize: str | None = None
    """Of the weights, for `prefill` and `decode`."""
    remat: str = "none"
    """What a training step keeps: see `tilewright.models.objective.remat_policy`."""

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The values of its config.json."""
        whole = PRESETS[self.preset]
        if self.layers is None:
            return whole
        if not 1 <= self.layers <= whole["num_hidden_layers"]:
            raise ValueError(
                f"--layers {self.layers} must be from 1 to {whole['num_hidden_layers']}, the layers of {self.preset}"
            )
        cut = {key: whole[key][: self.layers] for key in ("layer_types", "mlp_layer_types") if key in whole}
        return {**whole, **cut, "num_hidden_layers": self.layers}

    @functools.cached_property
    def architecture(self) -> Architecture:
        return architecture_of(Config(self.config))

    def model(self) -> Model:
        """With random weights, drawn in one program."""
        draw = jax.jit(lambda key: init(self.config, key, dtype=self.dtype, quantize=self.quantize))
        return draw(jax.random.key(0, impl=_KEYS))

    @property
    def name(self) -> str:
        parts = (self.preset, None if self.layers is None else f"{self.layers} layers", self.quantize)
        return " ".join(part for part in parts if part)


def bench_model(subject: Subject, workload: Workload, timing: Timing) -> Record:
    """Compiles, runs and times one workload of our model."""
    prepare = {"train": _train, "prefill": _prefill, "decode": _decode}[workload.what]
    began = time.perf_counter()
    run, metrics, calls = prepare(subject, workload)
    last = jax.block_until_ready(run())
    metrics["first_step_s"] = time.perf_counter() - began
    taken = tuple(each / calls for each in samples(run, jax.block_until_ready, timing.seconds))
    if workload.what == "train":
        loss = float(np.asarray(last["loss"]))
        if not math.isfinite(loss):
            raise ValueError(f"the loss of the first step is {loss}")
        metrics["loss"] = loss
    return _record(subject, workload, "tilewright", taken, metrics, {})


def bench_peer_model(
    peer: Peer, subject: Subject, workload: Workload, timing: Timing, python: str | None = None
) -> Record:
    """Times the same model and workload in a peer's process. Raises `Refused` and `Failed` as peers of ops do."""
    job = {
        "adapter": str(_FOLDER / f"model_of_{peer.name}.py"),
        "config": subject.config,
        "workload": dataclasses.asdict(workload),
        "new_tokens": _NEW_TOKENS - 1,
        "dtype": subject.dtype,
        "remat": subject.remat != "none",
        "platform": default_device().platform,
        "seconds": timing.seconds,
    }
    with tempfile.TemporaryDirectory(prefix="tilewright-peer-") as name:
        answer = answered(Path(name), job, python)
    metrics = {**answer["metrics"], "peer": True, "peer_device": answer["device"]}
    return _record(subject, workload, peer.name, tuple(answer["samples_s"]), metrics, answer["versions"])


def failure_record(subject: Subject, workload: Workload, implementation: str, metrics: Metrics) -> Record:
    """A record of a measurement that failed."""
    return _record(subject, workload, implementation, (), metrics, {})


def _record(
    subject: Subject,
    workload: Workload,
    implementation: str,
    samples_s: tuple[float, ...],
    metrics: Metrics,
    versions: Mapping[str, str],
) -> Record:
    where = Provenance.here(default_device())
    return Record(
        kind="bench",
        op="model",
        implementation=implementation,
        case=f"{subject.name} {workload}",
        dtype=subject.dtype,
        mode="forward+backward" if workload.what == "train" else "forward",
        provenance=dataclasses.replace(where, versions={**where.versions, **versions}),
        samples_s=samples_s,
        metrics=metrics | (_achieved(subject, workload, statistics.median(samples_s)) if samples_s else {}),
    )


def _achieved(subject: Subject, workload: Workload, seconds: float) -> Metrics:
    chip = Chip.of(default_device())
    peak_flops, peak_bytes = chip.flops_per_s(subject.dtype), chip.bytes_per_s
    flops_per_s = work_flops(subject, workload) / seconds
    found: Metrics = {
        "tokens_per_s": workload.counted / seconds,
        "flops_per_s": flops_per_s,
        "flops_fraction": flops_per_s / peak_flops if peak_flops else None,
    }
    if workload.what == "decode":
        found["bytes_per_s"] = decode_bytes(subject, workload) / seconds
        found["bytes_fraction"] = found["bytes_per_s"] / peak_bytes if peak_bytes else None
    return found


def work_flops(subject: Subject, workload: Workload) -> float:
    """The FLOPs of what a sample's time is for, without recomputation."""
    from tilewright.models.training import flops_per_token

    architecture, tokens = subject.architecture, workload.tokens
    # Decoding attends to the whole cache, which is twice what tokens of a prompt see on average.
    length = 2 * tokens if workload.what == "decode" else tokens
    trained = flops_per_token(architecture, length)
    if workload.what == "train":
        return trained * workload.counted
    head = 2.0 * architecture.d_model * architecture.vocab_size
    forward = trained / 3.0
    return forward * workload.batch if workload.what == "decode" else (forward - head) * workload.counted + head


def decode_bytes(subject: Subject, workload: Workload) -> float:
    """The bytes that a decoding step must read and write at least."""
    architecture, batch = subject.architecture, workload.batch
    weights = jax.eval_shape(
        lambda: init(subject.config, jax.random.key(0), dtype=subject.dtype, quantize=subject.quantize)
    ).weights
    # An embedding that is not the head, too, is read in `batch` places.
    total = float(_bytes([weights.norm, weights.embedding if weights.head is None else weights.head]))
    total += batch * architecture.d_model * weights.embedding.dtype.itemsize
    for run, stacks in zip(architecture.runs, weights.runs, strict=True):
        for block, own in zip(run.pattern, stacks, strict=True):
            total += _bytes(own)
            if isinstance(block.mlp, MoE):
                # The expected share of experts that no row of the batch chooses.
                idle = (1.0 - block.mlp.experts_per_token / block.mlp.num_experts) ** batch
                total -= idle * _bytes([own.mlp.gate_up, own.mlp.down])
    held = workload.tokens + _NEW_TOKENS // 2  # The mean over the steps.
    dtype = jnp.dtype(subject.dtype)
    states = jax.eval_shape(lambda: initial_states(architecture, batch, held, dtype))
    for name, leaf in state_leaves(states):
        # A cache is read up to its length, and a state is read and written.
        total += _bytes(leaf) * (held / leaf.shape[2] if name.endswith(CACHES) else 2)
    return total


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


_Prepared = tuple[Callable[[], Any], Metrics, int]
"""What to time; the metrics of its compilation; and the samples that one call of it counts for."""


def _compiled(lowered: Any, weights: Any) -> tuple[Any, Metrics]:
    began = time.perf_counter()
    compiled = lowered.compile()
    metrics: Metrics = {"compile_s": time.perf_counter() - began, **compiled_memory(compiled)}
    return compiled, metrics | {"parameters": sum(leaf.size for leaf in jax.tree.leaves(weights))}


def _drawn_ids(subject: Subject, *shape: int) -> jax.Array:
    return jax.random.randint(jax.random.key(1), shape, 0, subject.architecture.vocab_size, jnp.int32)


def _train(subject: Subject, workload: Workload) -> _Prepared:
    from tilewright.models.objective import cast
    from tilewright.models.train_config import OptimizerTable, TrainTable
    from tilewright.models.training import TrainState, optimizer_of, step_function

    if subject.quantize is not None:
        raise ValueError(f"--quantize {subject.quantize} is for prefill and decode; train without it")
    table = TrainTable(steps=10_000, batch_size=workload.batch, dtype=subject.dtype, remat=subject.remat)
    optimizing = OptimizerTable()
    architecture = subject.architecture

    def begin(key: Any) -> TrainState:
        weights: Any = cast(architecture, init(subject.config, key, dtype="float32").weights, "float32")
        return TrainState(jnp.int32(0), weights, optimizer_of(table, optimizing).init(weights))

    state = jax.jit(begin)(jax.random.key(0, impl=_KEYS))
    ids = _drawn_ids(subject, 1, workload.batch, workload.tokens)
    batch = {"ids": ids, "labels": jnp.roll(ids, -1, axis=-1), "segment_ids": None}
    step: Any = step_function(architecture, table, optimizing)
    compiled, metrics = _compiled(step.lower(state, None, batch), state.weights)

    def run() -> Any:
        nonlocal state
        state, measured = compiled(state, None, batch)
        return measured

    return run, metrics, 1


def _prefill(subject: Subject, workload: Workload) -> _Prepared:
    model = subject.model()
    ids = _drawn_ids(subject, workload.batch, workload.tokens)
    read = jax.jit(lambda model, ids: generation.read_prompt(model, ids, workload.tokens))
    compiled, metrics = _compiled(read.lower(model, ids), model.weights)
    return lambda: compiled(model, ids), metrics, 1


def _decode(subject: Subject, workload: Workload) -> _Prepared:
    model, batch = subject.model(), workload.batch
    states = _full_states(model, batch, workload.tokens)
    logits = jax.random.normal(jax.random.key(2), (batch, subject.architecture.vocab_size), jnp.float32)
    start = logits, jax.random.split(jax.random.key(3), batch)
    arguments = (model.architecture, model.weights, start, states, _NEW_TOKENS, generation.Sampling(), ())
    compiled, metrics = _compiled(generation.continued.lower(*arguments), model.weights)
    structure = jax.tree.structure(states)
    is_length = [name.endswith(".length") for name, _ in state_leaves(states)]

    def run() -> Any:
        nonlocal states
        tokens, _, after = compiled(model.weights, start, states)
        leaves = zip(jax.tree.leaves(after), is_length, strict=True)
        states = jax.tree.unflatten(structure, [leaf - (_NEW_TOKENS - 1) if at else leaf for leaf, at in leaves])
        return tokens

    return run, metrics, _NEW_TOKENS - 1


def _full_states(model: Model, batch: int, tokens: int) -> Any:
    """Random states after so many tokens, with room for those that are to come."""

    def draw(key: Any) -> Any:
        states = initial_states(model.architecture, batch, tokens + _NEW_TOKENS, model.dtype)
        leaves, structure = jax.tree.flatten(states)
        keys = jax.random.split(key, len(leaves))
        return jax.tree.unflatten(
            structure,
            [
                jnp.full(leaf.shape, tokens, leaf.dtype)
                if leaf.dtype == jnp.int32
                else (0.1 * jax.random.normal(key, leaf.shape, jnp.bfloat16)).astype(leaf.dtype)
                for leaf, key in zip(leaves, keys, strict=True)
            ],
        )

    return jax.jit(draw)(jax.random.key(4, impl=_KEYS))


TRANSFORMERS = Peer(
    name="transformers",
    package="transformers",
    install="pip install transformers torch flash-linear-attention",
    adapters=(),
    tensors=_FOLDER / "on_torch.py",
)
