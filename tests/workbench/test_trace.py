"""Traces: operations by device, nested ones, gaps, calls told apart, and device times with warm and cold caches."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tilewright.core.case import Work
from tilewright.core.dispatch import find_op
from tilewright.pallas import names
from tilewright.workbench import bench, device_time
from tilewright.workbench.bench import Timing, bench_case
from tilewright.workbench.device_time import DeviceTime, NoDeviceTime, of_events
from tilewright.workbench.hlo_work import OperationWork, operation_work
from tilewright.workbench.profile import NothingTraced, summarise, trace_calls
from tilewright.workbench.records import Record
from tilewright.workbench.trace import Event, Trace, busy_s, gaps, parse, split_calls

US = 1e-6


def plane(name: str, **lines: list[tuple[str, float, float, dict[str, Any]]]) -> str:
    """A plane as the profiler writes it, of lines of events: name, start and duration in us, statistics."""
    events = [event for line in lines.values() for event in line]
    metadata = list(dict.fromkeys(event[0] for event in events))
    keys = list(dict.fromkeys(key for event in events for key in event[3]))
    text = [f'name: "{name}"']
    for line, those in lines.items():
        inner = []
        for event, start, duration, stats in those:
            kept = " ".join(
                f"stats {{ metadata_id: {keys.index(key) + 1} "
                + (f'str_value: "{value}"' if isinstance(value, str) else f"int64_value: {value}")
                + " }"
                for key, value in stats.items()
            )
            place = f"metadata_id: {metadata.index(event) + 1} offset_ps: {int(start * 1e6)}"
            inner.append(f"events {{ {place} duration_ps: {int(duration * 1e6)} {kept} }}")
        text.append(f'lines {{ name: "{line.replace("_", " ")}" timestamp_ns: 5000 {" ".join(inner)} }}')
    for number, each in enumerate(metadata, 1):
        text.append(f'event_metadata {{ key: {number} value {{ id: {number} name: "{each}" }} }}')
    for number, each in enumerate(keys, 1):
        text.append(f'stat_metadata {{ key: {number} value {{ id: {number} name: "{each}" }} }}')
    return f"planes {{ {' '.join(text)} }}"


def read(*planes: str) -> Trace:
    return parse(jax.profiler.ProfileData.from_text_proto("\n".join(planes)))


# Two calls of a kernel and a copy, with a flush of the cache before each; host events and derived lines beside them.
KERNEL = "flash_attention_forward_mosaic_gpu_kernel"
OURS, FLUSH = {"hlo_module": "jit_f", "hlo_op": "custom-call.1"}, {"hlo_module": "jit_tilewright_flush_cache"}
GPU = (
    plane(
        "/device:GPU:0",
        **{
            "Stream_#7(Compute)": [
                ("input_reduce_fusion", 0, 100, FLUSH),
                (KERNEL, 110, 20, OURS),
                ("input_reduce_fusion", 140, 100, FLUSH),
                (KERNEL, 250, 22, OURS),
            ],
            "Stream_#8(MemcpyD2D)": [("MemcpyD2D", 125, 10, OURS), ("MemcpyD2D", 280, 10, OURS)],
            "XLA_Modules": [("jit_f", 110, 200, {})],
        },
    ),
    plane("/host:CPU", python=[("PjitFunction(f)", 0, 900, {}), ("fusion", 5, 800, {"hlo_op": "fusion"})]),
)


def test_a_gpus_operations_are_those_of_its_streams() -> None:
    trace = read(*GPU)
    assert trace.platform == "gpu"
    assert list(trace.devices) == ["/device:GPU:0"]
    events = trace.busiest
    assert [event.name for event in events] == [
        "input_reduce_fusion",
        KERNEL,
        "MemcpyD2D",
        "input_reduce_fusion",
        KERNEL,
        "MemcpyD2D",
    ]
    assert events[1].module == "jit_f"
    assert events[1].aliases == ("custom-call.1",)
    assert events[1].seconds == pytest.approx(20 * US)
    # The copy begins 5 us before the kernel ends.
    assert busy_s(events) == pytest.approx((100 + 25 + 100 + 22 + 10) * US)
    longest = gaps(events)[0]
    assert (longest.after, longest.before) == ("input_reduce_fusion", KERNEL)
    assert longest.seconds == pytest.approx(10 * US)


def test_the_flush_is_told_from_the_program() -> None:
    program = [event for event in read(*GPU).busiest if not device_time._is_flush(event)]
    found = of_events(program, calls=2)
    assert found.warm_s == pytest.approx((25 * US, 32 * US))
    assert found.kernels_s == pytest.approx({KERNEL: 21 * US, "MemcpyD2D": 10 * US})
    assert next(iter(found.kernels_s)) == KERNEL
    # Calls that cannot be told apart give their mean.
    assert of_events(program, calls=3).warm_s == pytest.approx((57 / 3 * US,))
    assert split_calls(tuple(program[:3] + program[:1]), 2) == []
    with pytest.raises(NoDeviceTime, match="has no kernels; on an NVIDIA GPU it needs CUPTI"):
        of_events([], calls=2)
    assert "jit_tilewright_flush_cache" in str(device_time._flush.lower(jnp.zeros(4)).compile().as_text())


def test_a_tpus_loop_does_not_count_its_body_twice() -> None:
    body = {"hlo_module": "jit_f", "flops": 4000, "bytes_accessed": 100, "tf_op": "jit(f)/while/delta_rule_forward:"}
    trace = read(
        plane(
            "/device:TPU:0",
            XLA_Modules=[("jit_f", 0, 100, {})],
            XLA_Ops=[
                ("%while.1 = (f32[8]) while(%t)", 0, 100, {}),
                ("%custom-call.2 = f32[8] custom-call(%x)", 10, 30, body),
                ("%custom-call.2 = f32[8] custom-call(%x)", 50, 30, body),
                ("%copy.3 = f32[8] copy(%y)", 110, 5, {}),
            ],
        ),
        plane("/device:TPU:0 SparseCore 0", XLA_Ops=[("%other = f32[8] copy(%y)", 0, 500, {})]),
    )
    assert trace.platform == "tpu"
    assert [(event.name, round(event.own_s / US)) for event in trace.busiest] == [
        ("while.1", 40),
        ("custom-call.2", 30),
        ("custom-call.2", 30),
        ("copy.3", 5),
    ]
    names.note("delta_rule_forward")
    found = summarise(Path("t"), trace, steps=2, work=Work(1e6, 1e3))
    custom = found.operations[0]
    assert (custom.name, custom.calls, custom.ours) == ("custom-call.2", 2, True)
    assert (custom.flops, custom.bytes) == (8000, 200)
    assert found.our_share == pytest.approx(60 / 105)
    assert (found.span_s, found.busy_s) == pytest.approx((115 * US, 105 * US))
    # A kernel whose products the trace does not have, alone and once per step: they are those of the step.
    names.note("flash_attention_forward")
    (_, kernel, *_) = summarise(Path("t"), read(*GPU), steps=2, work=Work(1e6, 1e3)).operations
    assert (kernel.name, kernel.ours, kernel.flops) == (KERNEL, True, 2e6)
    with pytest.raises(NothingTraced, match="has no operation"):
        summarise(Path("t"), Trace("cpu", {}), steps=2)


def test_a_cpus_operations_are_read_from_a_real_trace(tmp_path: Path) -> None:
    @jax.jit
    def sorted_square(x: jax.Array) -> jax.Array:  # A name that no other program of this process has.
        return jnp.sort(x @ x)

    x = jnp.ones((64, 64))
    found = trace_calls(lambda: sorted_square(x), tmp_path, steps=4)
    assert sum(operation.flops or 0 for operation in found.operations) == 4 * 2 * 64**3
    assert found.platform == "cpu"
    assert found.busy_s <= found.span_s
    assert any("sort" in operation.name for operation in found.operations)
    assert found.our_share == 0
    assert list(tmp_path.rglob("*.xplane.pb"))
    assert list(tmp_path.rglob("*.trace.json.gz"))


def test_the_work_of_operations_is_read_from_the_compiled_program() -> None:
    """Of a product inside a loop, of an operand that is sliced, and of an array that is updated in place."""
    text = """HloModule m, is_scheduled=true

%inner (p: bf16[32,64], q: f32[64,128]) -> f32[32,128] {
  %p = bf16[32,64]{1,0:T(8,128)} parameter(0)
  %q = f32[64,128]{1,0} parameter(1)
  ROOT %dot.1 = f32[32,128]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%sliced (a: f32[1000,8], i: s32[]) -> f32[1,8] {
  %a = f32[1000,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %dynamic-slice.1 = f32[1,8]{1,0} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={1,8}
}

ENTRY %main (x: bf16[32,64], y: f32[64,128], z: f32[1000,8], i: s32[]) -> (f32[32,128], f32[1000,8]) {
  %x = bf16[32,64]{1,0} parameter(0)
  %y = f32[64,128]{1,0} parameter(1)
  %z = f32[1000,8]{1,0} parameter(2)
  %i.1 = s32[] parameter(3)
  %fusion.1 = f32[32,128]{1,0} fusion(%x, %y), kind=kCustom, calls=%inner, metadata={op_name="a(b)/c"}
  %fusion.2 = f32[1,8]{1,0} fusion(%z, %i.1), kind=kLoop, calls=%sliced
  %update.1 = f32[1000,8]{1,0} dynamic-update-slice(%z, %fusion.2, %i.1, %i.1)
  %gemm.1 = (f32[32,128]{1,0}, s8[64]{0}) custom-call(%x, %y), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  ROOT %tuple.1 = (f32[32,128], f32[1000,8]) tuple(%fusion.1, %update.1)
}
"""  # noqa: E501, as XLA writes it
    found = operation_work(text)
    assert found["fusion.1"] == OperationWork(2.0 * 32 * 64 * 128, 2.0 * 32 * 64 + 4 * 64 * 128 + 4 * 32 * 128)
    assert found["fusion.2"] == OperationWork(None, 4.0 * 8 + 4 + 4 * 8)
    assert found["update.1"] == OperationWork(None, 2 * 4.0 * 8)
    assert found["gemm.1"].flops == 2.0 * 32 * 64 * 128


def test_bench_records_the_time_on_the_device_or_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    op = find_op("rms_norm")
    words = (op, op.case("odd"), "xla", "float32", "forward", Timing(seconds=0))
    record = bench_case(*words)
    assert record.metrics["no_device_time"] == "this is a CPU, whose trace has no device kernels"
    assert (record.device_samples_s, record.kernels_s) == ((), {})

    found = DeviceTime((2e-6, 3e-6, 4e-6), (7e-6,), {"norm": 3e-6})
    monkeypatch.setattr(bench, "device_time", lambda run, seconds: found)
    record = bench_case(*words)
    assert (record.metrics["device_s"], record.metrics["device_cold_s"]) == (3e-6, 7e-6)
    assert "no_device_time" not in record.metrics
    again = Record.from_json(record.to_json())
    assert again == record
    assert again.device_samples_s == (2e-6, 3e-6, 4e-6)
    assert again.kernels_s == {"norm": 3e-6}
    without = dataclasses.replace(found, cold_s=(), no_cold="out of memory")
    monkeypatch.setattr(bench, "device_time", lambda run, seconds: without)
    assert bench_case(*words).metrics["no_device_time"] == "with cold caches: out of memory"


def test_calls_on_a_device_are_traced_warm_and_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is made up: each run of the program is a kernel, slower after a flush."""
    ran: list[str] = []

    @dataclasses.dataclass
    class Gpu:
        platform: str = "gpu"

    def traced(run: Any, calls: int) -> tuple[Event, ...]:
        ran.clear()
        for _ in range(calls):
            run()
        times = {"flush": 50 * US, "program": (9 if "flush" in ran else 4) * US}
        marks = {"flush": "jit_tilewright_flush_cache", "program": "jit_f"}
        return tuple(Event(each, n, times[each], times[each], marks[each]) for n, each in enumerate(ran))

    monkeypatch.setattr(device_time, "default_device", Gpu)
    monkeypatch.setattr(device_time, "_traced", traced)
    monkeypatch.setattr(device_time, "_FLUSH_BYTES", 64)
    monkeypatch.setattr(device_time, "_flush", lambda buffer: ran.append("flush"))
    monkeypatch.setattr(jax, "default_device", lambda device: jax.numpy_dtype_promotion("strict"))
    found = device_time.device_time(lambda: ran.append("program"), 1.0)
    assert found.warm_s == pytest.approx((4 * US,) * 5)
    assert found.cold_s == pytest.approx((9 * US,) * 5)
    assert found.kernels_s == pytest.approx({"program": 4 * US})
    found = device_time.device_time(lambda: ran.append("program"), 1.0, warm=False)
    assert (found.warm_s, found.cold_s) == ((), pytest.approx((9 * US,) * 5))
    monkeypatch.setattr(device_time, "_is_flush", lambda event: False)
    found = device_time.device_time(lambda: ran.append("program"), 1.0, warm=False)
    assert (found.warm_s, found.cold_s) == (pytest.approx((4 * US,) * 5), ())
    assert found.no_cold == "the profiler's trace does not say which program a kernel is of"
