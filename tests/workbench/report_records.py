"""Records of every kind that a report shows: made up, with figures that look like real ones."""

import json
from pathlib import Path
from typing import Any

from tilewright.core.dispatch import find_op
from tilewright.workbench.records import Provenance, Record, append_records

_VERSIONS = {"jax": "0.12.0.1", "jaxlib": "0.12.0.1", "python": "3.12.1"}
H200 = Provenance("h200", "NVIDIA H200", 1, _VERSIONS, "0123456789abcdef" * 2 + "01234567", "2026-11-16T12:00:00+00:00")
V6E = Provenance("v6e", "none: estimated", 0, _VERSIONS, None, "2026-11-16T13:00:00+00:00")
CPU = Provenance("cpu", "cpu", 1, _VERSIONS, None, "2026-11-15T09:00:00+00:00")


def timed(op: str, case: str, implementation: str, seconds: float, where: Provenance = H200, **fields: Any) -> Record:
    """A measurement, with the rates that follow from the case's work."""
    samples = tuple(seconds * factor for factor in (0.99, 1.0, 1.0, 1.01, 1.02))
    mode, dtype = fields.pop("mode", "forward"), fields.pop("dtype", "bfloat16")
    metrics = {"temp_bytes": int(seconds * 1e11), **fields.pop("metrics", {})}
    found = find_op(op).case(case) if not op.startswith("Layer") else None
    if found is not None:
        work = (found.work_grad if mode == "forward+backward" else found.work)(2)
        metrics |= {"flops_per_s": work.flops / seconds, "bytes_per_s": work.bytes / seconds}
    names: Any = {
        "kind": "bench",
        "op": op,
        "case": case,
        "implementation": implementation,
        "dtype": dtype,
        "mode": mode,
    }
    return Record(**names, provenance=where, samples_s=samples, metrics=metrics, **fields)


def device(seconds: float, cold: float, **kernels_s: float) -> dict[str, Any]:
    return {
        "device_samples_s": (seconds,) * 5,
        "device_cold_samples_s": (cold,) * 5,
        "kernels_s": kernels_s or {"kernel": seconds},
        "metrics": {"device_s": seconds, "device_cold_s": cold},
    }


def judged(error: float, *, agrees: bool = True, **metrics: Any) -> dict[str, Any]:
    return {"agrees": agrees, "error": error, "error_tolerance": 2e-2, "error_in": "out", **metrics}


def write_records(folder: Path) -> list[Path]:
    """Writes files of records into a folder, one of each tool."""
    bench, tune = folder / "bench.jsonl", folder / "tune.jsonl"
    ours = device(1.2e-3, 1.3e-3, flash_attention_forward_mosaic_gpu=1.2e-3)
    ours["metrics"] |= judged(3e-3)
    small = device(118e-6, 135e-6, decode_attention_mosaic_gpu=114e-6, decode_attention_combine_mosaic_gpu=4e-6)
    attention = "flash_attention"
    append_records(
        bench,
        [
            timed(attention, "causal_8k", "pallas_gpu", 1.25e-3, **ours),
            timed(attention, "causal_8k", "xla", 9.1e-3, metrics=judged(4e-3)),
            timed(attention, "causal_8k", "cudnn", 1.4e-3, metrics=judged(3e-3, peer=True)),
            timed(attention, "causal_8k", "fast_but_wrong", 0.2e-3, metrics=judged(0.7, agrees=False, peer=True)),
            timed("decode_attention", "llama_8k", "pallas_gpu", 161e-6, **small),
            Record(
                kind="bench",
                op=attention,
                case="causal_8k",
                implementation="reference",
                dtype="bfloat16",
                mode="forward",
                provenance=H200,
                metrics={"failure": "RESOURCE_EXHAUSTED: <script>alert(1)</script> Out of memory"},
            ),
            timed("rms_norm", "odd", "xla", 5e-5, CPU, metrics={"no_device_time": "this is a CPU"}),
            *(
                timed(f"Layer {layer}", f"t{t}", "xla", scale * (t / 1024) ** power, metrics={"tokens": t})
                for layer, scale, power in (("softmax", 1e-3, 1.9), ("delta", 2e-3, 1.0))
                for t in (1024, 2048, 4096, 8192, 16384)
            ),
            Record(
                kind="check",
                op="kda",
                case="short",
                implementation="pallas_gpu",
                dtype="bfloat16",
                mode="forward+backward",
                provenance=CPU,
                metrics={
                    "ok": True,
                    "interpreted": True,
                    "o: relative error": 2e-3,
                    "o: bound": 4e-3,
                    "d k: relative error": 3e-3,
                    "d k: bound": 4e-3,
                },
            ),
        ],
    )
    times = [2.0e-3, 1.8e-3, None, 1.9e-3, 0.3e-3, 1.5e-3, 1.52e-3, 1.5e-3]
    verdicts = ["ok", "ok", "crash", "ok", "wrong", "ok", "ok", "chosen"]
    blocks = [1, 2, 3, 4, 5, 6, 7, 6]
    append_records(
        tune,
        [
            Record(
                kind="tune",
                op=attention,
                case="causal_8k",
                implementation="pallas_gpu",
                dtype="bfloat16",
                mode="forward",
                provenance=H200,
                configs={"forward": {"config": "AttentionGpuForward", "block_q": 64 * block, "block_k": 128}},
                samples_s=() if seconds is None else (seconds,) * 3,
                metrics={
                    "direction": "forward",
                    "outcome": verdict,
                    "reason": None if verdict == "ok" else "it said so",
                    "heuristic_s": 2.0e-3 if verdict == "chosen" else None,
                },
            )
            for seconds, verdict, block in zip(times, verdicts, blocks, strict=True)
        ],
    )
    with tune.open("a") as file:
        file.write('{"op": "kda", "torn')
    compiled = folder / "compiled.json"
    named = {"kind": "estimate", "op": attention, "case": "causal_8k", "dtype": "bfloat16", "mode": "forward"}
    kernels = [{"name": "flash_attention_forward", "estimate": {"floor_us": 1500.0}}]
    compiled.write_text(
        json.dumps([{**named, "chip": "v6e", "ok": True, "kernels": kernels, "estimate": {"floor_us": 1500.0}}])
    )
    return [bench, tune, compiled]
