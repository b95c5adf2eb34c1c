"""Plots of records."""

from collections.abc import Sequence
from pathlib import Path

from tilewright.workbench.records import Record


def check_plot(path: Path) -> None:
    """Raises `ValueError` where no plot can be written: in the format that the suffix names, or at all."""
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        name = path.with_suffix(".png") if path.name else "times.png"
        raise ValueError(f"--plot {path} has no suffix of a format for plots; use {name}, .pdf or .svg")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(f"--plot {path} needs matplotlib: pip install 'tilewright[bench]'") from error


def plot_bench(records: Sequence[Record], path: Path) -> None:
    """Plots the median time (and quartiles) and the temporary memory of each implementation, case by case.

    Records without samples, of what failed, are left out.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    records = [record for record in records if record.samples_s]
    groups = list(dict.fromkeys((record.case, record.dtype) for record in records))
    names = list(dict.fromkeys(record.implementation for record in records))
    by_key = {(record.case, record.dtype, record.implementation): record for record in records}
    figure, (times, sizes) = plt.subplots(1, 2, figsize=(6 + 1.3 * len(groups), 4.5), layout="constrained")
    width = 0.8 / len(names)
    for offset, name in enumerate(names):
        held = [(place, by_key[(*group, name)]) for place, group in enumerate(groups) if (*group, name) in by_key]
        at = np.array([place for place, _ in held]) + (offset - (len(names) - 1) / 2) * width
        medians = np.array([record.median_s for _, record in held]) * 1e3
        quartiles = [np.quantile(record.samples_s, (0.25, 0.75)) * 1e3 for _, record in held]
        below = [median - low for median, (low, _) in zip(medians, quartiles, strict=True)]
        above = [high - median for median, (_, high) in zip(medians, quartiles, strict=True)]
        times.bar(at, medians, width, yerr=[below, above], capsize=3, label=name)
        temporary = [float(record.metrics.get("temp_bytes") or 0) / 2**20 for _, record in held]
        sizes.bar(at, temporary, width, label=name)
    for axes, label in ((times, "median time, ms (bars: quartiles)"), (sizes, "temporary memory, MiB")):
        axes.set_xticks(range(len(groups)), [f"{case}\n{dtype}" for case, dtype in groups], fontsize=8)
        axes.set_yscale("log")
        axes.set_ylabel(label)
        axes.grid(axis="y", alpha=0.3)
    times.legend(fontsize=8)
    where = records[0].provenance
    figure.suptitle(
        f"{records[0].op}, {records[0].mode}, {where.device_kind}, jax {where.versions['jax']}, {where.date[:10]}",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
