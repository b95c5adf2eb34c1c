"""The results as plots and a page to read, all of it made from the records."""

import math
import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from delta_attention_comparison.contenders import LAYERS, OPS, TITLES, Preset
from tilewright.workbench.bench import Mode
from tilewright.workbench.figures import memory, seconds
from tilewright.workbench.records import Provenance, Record

_COLOURS = {"kda": "tab:blue", "gdn": "tab:orange", "deltanet": "tab:green", "softmax": "tab:red"}
_FITTED_LENGTHS = 4
MODES: tuple[Mode, ...] = ("forward", "forward+backward")


@dataclass
class Findings:
    """What a run has measured, and what it has not."""

    preset_name: str
    preset: Preset
    layers: tuple[str, ...]
    where: Provenance
    records: list[Record] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    seconds: float = 0.0
    keep: Callable[[Record], None] = lambda record: None
    """Called with each record as it is made."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, record: Record) -> None:
        with self._lock:
            self.records.append(record)
            self.keep(record)

    def speed(self, name: str, mode: str) -> list[Record]:
        """The records of one layer, by length."""
        return [
            r
            for r in self.records
            if r.op == TITLES[name] and r.case.startswith("t") and r.mode == mode and r.samples_s
        ]

    def recall(self, name: str) -> list[Record]:
        return [r for r in self.records if r.op == TITLES[name] and r.case.startswith("recall_")]

    def checks(self) -> list[Record]:
        """The records of checks, in the order of the layers."""
        order = [OPS[name] for name in self.layers]
        return sorted((r for r in self.records if r.kind == "check"), key=lambda record: order.index(record.op))


def number(record: Record, name: str) -> float:
    value = record.metrics.get(name)
    return float(value) if isinstance(value, int | float) else math.nan


def growth(records: list[Record], values: list[float]) -> float:
    """The exponent p of values ~ T^p, by least squares over the last four lengths."""
    if len(records) < 2 or not min(values) > 0:
        return math.nan
    at = [(math.log(number(record, "tokens")), math.log(value)) for record, value in zip(records, values, strict=True)]
    return statistics.linear_regression(*zip(*at[-_FITTED_LENGTHS:], strict=True)).slope


def write_report(found: Findings, folder: Path) -> Path:
    """Writes report.md and its plots into `folder`, and returns the path of the report."""
    sections = [_heading(found)]
    if any(found.speed(name, MODES[0]) for name in found.layers):
        _plot_times(found, folder / "time.png")
        _plot_memory(found, folder / "memory.png")
        sections.append(_speed_section(found))
    if found.checks():
        sections.append(_numerics_section(found))
    if any(found.recall(name) for name in found.layers):
        _plot_recall(found, folder / "recall.png")
        sections.append(_recall_section(found))
    sections.append(_missing_section(found))
    path = folder / "report.md"
    path.write_text("\n\n".join(sections) + "\n")
    return path


def _heading(found: Findings) -> str:
    where, size = found.where, found.preset
    versions = ", ".join(f"{name} {version}" for name, version in where.versions.items())
    heads = "1 head" if size.num_heads == 1 else f"{size.num_heads} heads"
    return f"""# Delta-rule layers and softmax attention, side by side

Made on {where.device_kind} (chip {where.chip}, {where.device_count} visible, one used), {where.date}, in \
{found.seconds:.0f} s, with the preset `{found.preset_name}`.
{versions}; commit {where.commit or "unknown (not a checkout)"}.

Layers: {", ".join(f"{TITLES[name]} (`{name}`)" for name in found.layers)}, each with D={size.d_model} and \
{heads} of {size.head_dim} channels. Every figure is in `records.jsonl`, with all its samples and block sizes."""


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _speed_section(found: Findings) -> str:
    size = found.preset
    rows = []
    for mode in MODES:
        for name in found.layers:
            for record in found.speed(name, mode):
                rows.append(
                    (
                        TITLES[name],
                        record.implementation,
                        mode,
                        f"{number(record, 'tokens') / size.batch:,.0f}",
                        seconds(number(record, "first_step_s")),
                        seconds(record.median_s),
                        f"{record.spread:.0%}",
                        f"{number(record, 'tokens_per_s'):,.0f}",
                        memory(number(record, "temp_bytes")),
                        memory(number(record, "peak_bytes")),
                    )
                )
    header = ("layer", "its op", "mode", "T", "first step", "median", "spread", "tokens/s", "temporary", "peak")
    exponents = []
    for name in found.layers:
        cells = [TITLES[name]]
        for mode in MODES:
            held = found.speed(name, mode)
            cells.append(_exponent(growth(held, [record.median_s for record in held])))
            cells.append(_exponent(growth(held, [number(record, "temp_bytes") for record in held])))
        exponents.append(tuple(cells))
    measured = sorted({number(r, "tokens") / size.batch for name in found.layers for r in found.speed(name, MODES[0])})
    lengths = " to ".join(f"{t:,.0f}" for t in (measured[-_FITTED_LENGTHS:][0], measured[-1]))
    parallel = f" ({size.compile_workers} programs at a time)" if size.compile_workers > 1 else ""
    grown = ""
    if len(measured) > 1:
        grown = f"""
Growth over T = {lengths}, as the exponent p of a fit to T^p (1 is linear, 2 is quadratic):

{_table(("layer", "time, forward", "memory, forward", "time, both", "memory, both"), exponents)}
"""
    return f"""## Speed and memory

{size.dtype}, batch {size.batch}. The first step is tracing, compiling{parallel} and running once; the median is of the \
steady state, and the spread is the interquartile range divided by it. Memory is what the compiler allots: temporary, and \
at its peak with arguments and results. Backward computes the gradients of x and of every weight.

![time over T](time.png)
![memory over T](memory.png)
{grown}
{_table(header, rows)}"""


def _exponent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _numerics_section(found: Findings) -> str:
    rows = []
    for record in found.checks():
        quantities = [
            key.removesuffix(": relative error") for key in record.metrics if key.endswith(": relative error")
        ]
        shares = {q: number(record, f"{q}: relative error") / number(record, f"{q}: bound") for q in quantities}
        worst = max(shares, key=lambda quantity: shares[quantity])
        rows.append(
            (
                record.op,
                record.implementation + (" (interpreted)" if record.metrics["interpreted"] else ""),
                record.case,
                record.dtype,
                worst,
                f"{number(record, f'{worst}: relative error'):.1e}",
                f"{number(record, f'{worst}: bound'):.1e}",
                "ok" if record.metrics["ok"] else "**MISS**",
            )
        )
    header = ("op", "implementation", "case", "dtype", "worst quantity", "relative error", "bound", "")
    return f"""## Numerics

Outputs and every gradient against the reference in float64. The bound is twice the error of the reference in the same \
dtype, plus a tiny floor. The table shows the quantity that is nearest to its bound.

{_table(header, rows)}"""


def _recall_section(found: Findings) -> str:
    size = found.preset
    budget, task = size.budget, size.task
    rows = []
    for name in found.layers:
        held = found.recall(name)
        if held:
            cells = [f"{number(record, 'accuracy'):.1%}" for record in held]
            cost = (f"{number(held[0], 'parameters'):,.0f}", f"{number(held[0], 'last_loss'):.3f}")
            rows.append((TITLES[name], *cells, *cost))
    header = ("layer", *(f"{pairs} pairs" for pairs in task.pairs), "parameters", "last loss")
    return f"""## Recall

Multi-query associative recall: a row has pairs of a key and a value, then all the keys in another order, and the model \
answers with their values. {budget.blocks} blocks of width {budget.d_model}, {budget.steps} steps of {budget.rows} rows, \
with the same data, optimizer (AdamW, {budget.learning_rate:g}) and about the same number of parameters for every layer; \
one seed. Accuracy is over {budget.test_rows} rows per number of pairs that were not trained on; a random guess is right \
in {task.chance:.1%} of the cases.

![accuracy over pairs](recall.png)

{_table(header, rows)}"""


def _missing_section(found: Findings) -> str:
    platform = {"tpu": "TPU", "gpu": "GPU"}
    here = "tpu" if "TPU" in found.where.device_kind else "cpu" if found.where.chip == "cpu" else "gpu"
    lines = [f"no {word} here: nothing in this report was run on one" for key, word in platform.items() if key != here]
    lines += [f"{TITLES[name]}: left out by --layers" for name in LAYERS if name not in found.layers]
    if here == "cpu":
        lines.append("device memory in use: a CPU does not report it; the memory above is what the compiler allots")
    lines.append("power, cost, and more than one device")
    lines += found.missing
    return "## Not measured\n\n" + "\n".join(f"- {line}" for line in lines)


def _figure(found: Findings, title: str, panels: int) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, panels, figsize=(2 + 5 * panels, 4.8), sharey=True, squeeze=False, layout="constrained"
    )
    where = found.where
    figure.suptitle(f"{title}\n{where.device_kind}, jax {where.versions['jax']}, {where.date[:10]}", fontsize=10)
    for panel in axes[0]:
        panel.grid(alpha=0.3, which="both")
    return figure, axes[0]


def _save(figure: Any, panel: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4 if len(labels) == 4 else 3, fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _plot_over_lengths(
    found: Findings, path: Path, title: str, label: str, value: Callable[[Record], float], *, powers: tuple[int, ...]
) -> None:
    """A panel per mode, with dotted lines that grow as these powers of T for comparison."""
    size = found.preset
    figure, panels = _figure(found, f"{title}, {size.dtype}, D={size.d_model}, batch {size.batch}", len(MODES))
    for panel, mode in zip(panels, MODES, strict=True):
        first_values = []
        for name in found.layers:
            held = found.speed(name, mode)
            at = [number(record, "tokens") / size.batch for record in held]
            values = [value(record) for record in held]
            panel.plot(at, values, marker="o", color=_COLOURS[name], label=TITLES[name])
            first_values += [(at[0], at[-1], values[0])] if len(values) > 1 else []
        if first_values:
            first, last, base = min(first_values, key=lambda line: line[2])
            for power in powers:
                end = base / 2 * (last / first) ** power
                panel.plot([first, last], [base / 2, end], ":", color="grey", linewidth=1)
                name = "T²" if power == 2 else "T"
                panel.annotate(
                    name, (last, end), (5, 0), textcoords="offset points", fontsize=9, color="grey", va="center"
                )
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        lengths = sorted({int(at) for line in panel.get_lines() for at in line.get_xdata()})
        panel.set_xticks(lengths, [f"{t:,}" for t in lengths])
        panel.set_xlabel("T, tokens per sequence")
        panel.set_title(mode, fontsize=10)
    panels[0].set_ylabel(label)
    _save(figure, panels[0], path)


def _plot_times(found: Findings, path: Path) -> None:
    _plot_over_lengths(
        found, path, "time per layer", "median time, ms", lambda record: record.median_s * 1e3, powers=(1, 2)
    )


def _plot_memory(found: Findings, path: Path) -> None:
    def mebibytes(record: Record) -> float:
        return number(record, "temp_bytes") / 2**20

    _plot_over_lengths(found, path, "temporary memory per layer", "temporary memory, MiB", mebibytes, powers=(1,))


def _plot_recall(found: Findings, path: Path) -> None:
    budget, task = found.preset.budget, found.preset.task
    figure, (panel,) = _figure(found, f"recall after {budget.steps} steps of {budget.rows} rows", 1)
    for name in found.layers:
        held = found.recall(name)
        pairs = [number(record, "pairs") for record in held]
        panel.plot(pairs, [number(r, "accuracy") for r in held], marker="o", color=_COLOURS[name], label=TITLES[name])
    panel.axhline(task.chance, linestyle=":", color="grey", label="random guess")
    panel.set_xscale("log", base=2)
    panel.set_xticks(list(task.pairs), [str(pairs) for pairs in task.pairs])
    panel.set_xlabel("pairs to remember")
    panel.set_ylabel("accuracy")
    panel.set_ylim(0, 1.02)
    _save(figure, panel, path)
