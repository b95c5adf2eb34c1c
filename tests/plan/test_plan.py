"""`tilewright.plan`: its counts against counts by hand and against compiled steps, the search, and the verb."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("optax")

from tests.cli.test_cli import assert_refused, ran
from tilewright.cli import bench_model as cli_bench_model
from tilewright.core.chip import GIB, Chip
from tilewright.models.train_config import LoraTable
from tilewright.parallel import MeshError, Pipeline, make_mesh
from tilewright.plan import Place, Step, estimate
from tilewright.plan.advice import is_out_of_memory
from tilewright.plan.compiled import read_collectives, read_largest
from tilewright.plan.estimate import Estimate
from tilewright.plan.program import Work, measure
from tilewright.plan.search import alternatives, meshes
from tilewright.plan.step import ordered, read_model
from tilewright.workbench.model_bench import PRESETS

SMALL = {
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
MESH = AbstractMesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)


def struct(*shape: int, spec: P | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=None if spec is None else NamedSharding(MESH, spec))


def work_of(function: Any, *args: Any) -> Work:
    with jax.sharding.use_abstract_mesh(MESH):
        traced = jax.jit(function).trace(*args)
    names = [str(n) for n in range(len(args))]
    kinds: list[Any] = ["weights"] * len(args)
    return measure(traced, kinds, names, [False] * len(args))


def sent(work: Work) -> dict[tuple[str, tuple[str, ...]], tuple[float, float]]:
    return {(each.kind, each.axes): (each.count, each.bytes) for each in work.collectives}


def test_products_sums_and_gathers_of_a_loop_are_counted() -> None:
    def layers(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        def body(x: jax.Array, layer: Any) -> Any:
            hidden = x @ jax.sharding.reshard(layer[0], P(None, "tensor"))  # 2 x 4 x 16 x 16 FLOPs of a device
            return jnp.dot(hidden, layer[1], out_sharding=P("data", None)), None  # as many, and a sum of [4, 16]

        return jax.lax.scan(body, x, (up, down))[0]

    work = work_of(
        layers,
        struct(8, 16, spec=P("data", None)),
        struct(3, 16, 32, spec=P(None, "data", "tensor")),
        struct(3, 32, 16, spec=P(None, "tensor", None)),
    )
    assert work.flops == 3 * 2 * (2 * 4 * 16 * 16)
    # Of two devices, a device sends half of a gathered [16, 16], and half of a sum twice.
    assert sent(work) == {
        ("all-gather", ("data",)): (3, 3 * 16 * 16 * 4 / 2),
        ("all-reduce", ("tensor",)): (3, 3 * 2 * 4 * 16 * 4 / 2),
    }


def test_the_gradient_of_a_gathered_weight_is_scattered() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(x @ jax.sharding.reshard(w, P())))

    work = work_of(jax.grad(loss), struct(16, 8, spec=P("data", None)), struct(8, 16, spec=P("data", None)))
    assert sent(work)["reduce-scatter", ("data",)] == (1, 16 * 8 * 4 / 2)
    assert sent(work)["all-reduce", ("data",)] == (1, 4)  # The loss, of one number.


def test_memory_is_what_the_backward_pass_reads() -> None:
    def loss(ws: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0])

    work = work_of(jax.grad(loss), struct(5, 128, 128), struct(64, 128))
    held = work.memory()
    assert held["weights"] == (5 * 128 * 128 + 64 * 128) * 4
    # Per layer its input, which the weight's gradient needs, and tanh's derivative or result.
    assert held["activations"] == 5 * 2 * 64 * 128 * 4
    assert 5 * 128 * 128 * 4 <= held["gradients"] <= 1.4 * 5 * 128 * 128 * 4  # And those that the loop carries.
    named = [each.name for each in work.buffers if each.kind == "activations"]
    assert any("test_plan.py" in name for name in named), named


HLO = """HloModule jit_step
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %a = f32[8]{0} parameter(0)
  %g = f32[16]{0} all-gather(%a), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}
  %r = (f32[8]{0}, f32[8]{0}) all-reduce-start(%a), replica_groups={{0,1},{2,3}}, to_apply=%sum
  ROOT %t = (s32[], f32[8]) tuple(%i, %a)
}
%condition (p: (s32[], f32[8])) -> pred[] {
  %n = s32[] constant(7)
  ROOT %c = pred[] compare(%i, %n), direction=LT
}
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %w = (s32[], f32[8]) while(%x), condition=%condition, body=%body
  %s = f32[8]{0} reduce-scatter(%big), replica_groups=mesh['data'=2,'tensor'=2] {'data','tensor'}, dimensions={0}
  %big = f32[32]{0} iota(), metadata={op_name="jit(step)/jvp()/iota"}
}
"""


def test_collectives_of_a_compiled_program_by_axis_and_as_often_as_they_run() -> None:
    found = {(each.kind, each.axes): each for each in read_collectives(HLO, {"data": 2, "tensor": 2})}
    gathered, summed = found["all-gather", ("data",)], found["all-reduce", ("tensor",)]
    scattered = found["reduce-scatter", ("data", "tensor")]
    assert (gathered.count, gathered.bytes, gathered.asynchronous) == (7, 7 * 64 / 2, 0)
    assert (summed.count, summed.bytes, summed.asynchronous) == (7, 7 * 2 * 32 / 2, 7)
    assert (scattered.count, scattered.bytes) == (1, 128 * 3 / 4)
    assert read_largest(HLO, 1) == (("jvp()/iota", "f32[32]", 128.0),)


def test_links_of_a_torus_and_of_hosts() -> None:
    v6e, h200 = Chip.named("v6e"), Chip.named("h200")
    slice_ = Place.of(v6e, "4x4")
    assert slice_.num_devices == 16
    assert slice_.usable_bytes == pytest.approx(31.24 * GIB)
    assert slice_.bytes_per_s({"fsdp": 4, "tensor": 4}) == {"tensor": 100e9, "fsdp": 100e9}
    assert slice_.bytes_per_s({"fsdp": 16}) == {"fsdp": 200e9}
    assert Place.of(v6e, "16x16").bytes_per_s({"fsdp": 256}) == {"fsdp": 400e9}  # Two rings.
    assert Place.of(Chip.named("v7x"), "2x2x1").num_devices == 8
    two_hosts = Place.of(h200, "1x2x8")
    assert two_hosts.bytes_per_s({"fsdp": 2, "tensor": 8}) == {"tensor": 450e9, "fsdp": 50e9}
    with pytest.raises(ValueError, match="has a torus of 2 axes"):
        Place.of(v6e, "2x2x2")


def test_a_mesh_that_does_not_divide_names_the_nearest() -> None:
    step = Step(json.dumps(SMALL), 8, 16, ordered({"tensor": 4}))
    with pytest.raises(
        MeshError, match="has 2 heads; tensor=4 does not divide it, and the nearest that works is tensor=2"
    ):
        step.check()
    with pytest.raises(MeshError, match=r"batch=6 rows cannot be cut into 4 parts, fsdp=4, .*use batch=8"):
        Step(json.dumps(SMALL), 6, 16, ordered({"fsdp": 4})).check()
    with pytest.raises(MeshError, match="batch=6 rows cannot be cut into 4 microbatches; the nearest that works is 3"):
        Step(json.dumps(SMALL), 6, 16, accumulate=4).check()
    with pytest.raises(
        MeshError, match="seq=18 tokens: context=4 does not divide it, and the nearest that works is cont"
    ):
        Step(json.dumps(SMALL), 8, 18, ordered({"context": 4})).check()
    with pytest.raises(
        MeshError, match=r"pipeline=2 with interleave=2 needs a multiple of 4, and the nearest .*leave=1"
    ):
        Step(json.dumps(SMALL), 8, 16, ordered({"pipeline": 2}), pipeline=Pipeline(interleave=2)).check()
    with pytest.raises(MeshError, match="pipeline=2: the stages of a pipeline keep no states, so they cannot decode"):
        Step(json.dumps(SMALL), 8, 16, ordered({"pipeline": 2}), decode=True).check()
    assert len(list(meshes(8, ("data", "fsdp", "tensor", "expert")))) == 20  # 2^3 as a product of four.
    found = alternatives(Step(json.dumps(SMALL), 8, 16, ordered({"fsdp": 4})))
    assert {each.sizes.get("tensor", 1) for each in found} == {1, 2}
    staged = alternatives(Step(json.dumps(SMALL), 8, 16, ordered({"fsdp": 2, "pipeline": 2})))
    assert {each.sizes["pipeline"] for each in staged} == {2}


def test_accumulated_batches_share_a_bubble_and_keep_a_bounded_number_of_microbatches() -> None:
    step = Step(json.dumps(SMALL), 32, 16, ordered({"pipeline": 2}), accumulate=4, pipeline=Pipeline(microbatches=2))
    found = Estimate(step, Place.of(Chip.named("v6e"), "1x2"), Work(0.0, 0.0, (), ()))
    assert found.pipeline == {"stages": 2, "microbatches": 8, "interleave": 1, "steps": 9, "bubble": 1 / 9}
    assert step.tokens_at_once == 5 * 2 * 16  # Of 5 microbatches, each of 4 rows on both devices.


def test_what_lora_holds_is_frozen_weights_and_the_state_of_its_factors() -> None:
    whole, trained = Step(json.dumps(SMALL), 8, 16), Step(json.dumps(SMALL), 8, 16, lora=LORA)
    factors = 2 * 4 * ((32 + 64) + (32 + 32))  # Of q and v of two layers, [D, rank] and [rank, outputs].
    assert trained.state_bytes() == whole.state_bytes() / 6 + 3 * 4 * factors
    assert sum(kind == "optimizer" for kind, _, _ in trained.prepared.told) == 3 + 2 * 4


def test_models_are_read_by_preset_folder_and_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    assert read_model("qwen3-8b") == ("qwen3-8b", PRESETS["qwen3-8b"])
    assert read_model(str(tmp_path))[1] == read_model(str(tmp_path / "config.json"))[1] == SMALL
    with pytest.raises(ValueError, match=r"is no preset, folder or config\.json; the presets are tiny, "):
        read_model("qwen9")


@pytest.mark.slow
def test_the_verb_says_what_does_not_fit_and_what_would(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    asked = ("plan", str(tmp_path), "--topology", "2x2", "--batch", "8", "--seq", "128", "--compile", "no")
    done = ran(
        *asked, "--mesh", "fsdp=2,tensor=2", "--memory", "0.0025", "--tries", "2", "--out", str(tmp_path / "out")
    )
    assert done.code == 0, done
    for words in ("together: does not fit", "what fits, the fastest first", "floor, bound by", "fsdp x tensor"):
        assert words in done.stdout, done.stdout
    written = json.loads((tmp_path / "out").read_text())
    assert written["kind"] == "estimate"
    assert not written["estimate"]["fits"]
    parameters = 256 * 32 + 2 * (32 * (64 + 2 * 32 + 64) + 3 * 32 * 64)  # Without norms.
    weights = written["estimate"]["memory"]["weights"]
    assert weights == pytest.approx((4 + 2) * parameters / 4, rel=0.1)  # float32, and their copy in bfloat16.
    assert all(each["fits"] and each["bytes"] < written["estimate"]["bytes"] for each in written["alternatives"])
    assert_refused(
        ((*asked, "--mesh", "tensor=4"), "has 2 heads; tensor=4 does not divide it, and the nearest"),
        ((*asked, "--mesh", "fsdp=3"), "--mesh fsdp=3 has 3 devices, which do not divide the 4"),
    )


LORA = LoraTable(rank=4, alpha=8.0, targets=("q_proj", "v_proj"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "own", "kind", "axes"),
    [
        ({"fsdp": 2, "tensor": 2}, {}, "all-gather", ("fsdp",)),
        (
            {"pipeline": 2, "context": 2},
            {"pipeline": Pipeline(microbatches=4), "lora": LORA},
            "collective-permute",
            ("pipeline",),
        ),
    ],
)
def test_estimates_agree_with_the_compiled_step(mesh: Any, own: Any, kind: str, axes: tuple[str, ...]) -> None:
    """On four CPU devices: what is held exactly, collectives exactly, temporaries nearly."""
    step = Step(json.dumps(SMALL), 16, 64, ordered(mesh), dtype="float32", **own)
    place = Place(Chip.named("cpu"), (1, 1, 4), GIB)
    found = estimate(step, place)
    prepared = step.prepared
    devices = make_mesh(**mesh)

    def on_devices(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(devices, leaf.sharding.spec))

    with jax.set_mesh(devices):
        compiled = prepared.function.lower(*jax.tree.map(on_devices, prepared.arguments)).compile()
    analysis: Any = compiled.memory_analysis()
    tokens = step.accumulate * step.rows * step.tokens // mesh.get("context", 1)
    held = (
        step.state_bytes() + 3 * 4 + 2 * 4 * tokens
    )  # Counts of steps: the state's, AdamW's, its schedule's; ids, labels.
    assert analysis.argument_size_in_bytes == held
    temporary = found.bytes - held
    assert 0.6 < temporary / analysis.temp_size_in_bytes < 1.4
    theirs = {(each.kind, each.axes): each.bytes for each in read_collectives(compiled.as_text(), step.sizes)}
    ours = {(each.kind, each.axes): each.bytes for each in found.work.collectives}
    assert ours[kind, axes] == theirs[kind, axes]


OUT = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."


@pytest.mark.slow
def test_a_device_without_memory_is_answered_with_what_would_fit(tmp_path: Path, monkeypatch: Any) -> None:
    def full(**_: Any) -> None:
        raise jax.errors.JaxRuntimeError(OUT)

    monkeypatch.setattr(cli_bench_model, "bench_ours", full)
    words = ("--layers", "1", "--run", "train:8x64", "--records", str(tmp_path / "records.jsonl"))
    done = ran("bench", "model", "tiny", *words)
    assert done.code == 1
    assert "failed: tilewright tiny 1 layers train:8x64: out of memory: the step needs about" in done.flat
    assert "the largest buffer is" in done.flat
    assert "What would fit: " in done.flat
    assert "microbatches of" in done.flat or "remat=" in done.flat


def test_which_errors_are_of_memory() -> None:
    error = jax.errors.JaxRuntimeError
    assert is_out_of_memory(error(OUT))
    assert not is_out_of_memory(ValueError(OUT))
    assert not is_out_of_memory(error("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem."))
