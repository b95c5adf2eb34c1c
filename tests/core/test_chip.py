"""The table of chips: the figures of rooflines, the names of devices, and devices that are not in the table."""

from types import SimpleNamespace

import jax
import pytest

from tilewright.core.chip import CHIPS, GIB, MIB, RENTED, Chip


def device(kind: str, platform: str, **more: object) -> SimpleNamespace:
    return SimpleNamespace(device_kind=kind, platform=platform, **more)


@pytest.mark.parametrize(
    ("kind", "platform", "name"),
    [
        ("TPU v4", "tpu", "v4"),
        ("TPU v5 lite", "tpu", "v5e"),
        ("TPU v5p", "tpu", "v5p"),
        ("TPU v6 lite", "tpu", "v6e"),
        ("TPU7x", "tpu", "v7x"),
        ("NVIDIA A100-SXM4-80GB", "gpu", "a100"),
        ("NVIDIA H100 80GB HBM3", "gpu", "h100"),
        ("NVIDIA H200", "gpu", "h200"),
        ("NVIDIA B200", "gpu", "b200"),
        ("NVIDIA L4", "gpu", "l4"),
        ("cpu", "cpu", "cpu"),
        ("AMD EPYC 7763", "cpu", "cpu"),
    ],
)
def test_devices_are_recognised_by_their_kind(kind: str, platform: str, name: str) -> None:
    assert Chip.of(device(kind, platform)) is Chip.named(name)


@pytest.mark.parametrize(
    ("kind", "platform"), [("NVIDIA H100 PCIe", "gpu"), ("NVIDIA GeForce RTX 4090", "gpu"), ("TPU v9", "tpu")]
)
def test_an_unknown_device_is_unknown_and_has_no_figures(kind: str, platform: str) -> None:
    chip = Chip.of(device(kind, platform, compute_capability="8.9"))
    assert chip.name == "unknown"
    assert chip.platform == platform
    assert not chip.known
    assert chip.flops_per_s("bfloat16") is None
    assert chip.bytes_per_s is None
    assert chip.compute_capability == (8, 9)


def test_a_cpu_has_no_peak() -> None:
    assert Chip.of(jax.devices("cpu")[0]).flops_per_s("float32") is None


def test_a_v7x_device_is_half_of_its_chip() -> None:
    chip = Chip.named("v7x")
    assert chip.flops_per_s("bfloat16") == pytest.approx(2307e12 / 2)
    assert chip.bytes_per_s == pytest.approx(7380e9 / 2)
    assert Chip.named("v5p").flops_per_s("bfloat16") == pytest.approx(459e12)


@pytest.mark.parametrize(("name", "giga"), [("v4", 1.05), ("v5e", 1.5), ("v5p", 1.75), ("v6e", 1.75), ("v7x", 2.2)])
def test_the_clock_that_follows_from_the_peak_is_right(name: str, giga: float) -> None:
    """FLOP/s = 2 cores MXUs size^2 rows-per-cycle clock, with the published clocks of these chips."""
    assert Chip.named(name).clock_hz == pytest.approx(giga * 1e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "giga"), [("a100", 1.41), ("h100", 1.98), ("h200", 1.98), ("b200", 1.965), ("l4", 2.04)]
)
def test_so_is_that_of_a_gpu(name: str, giga: float) -> None:
    assert Chip.named(name).clock_hz == pytest.approx(giga * 1e9, rel=0.01)


def test_sizes() -> None:
    assert Chip.named("v5e").vmem_bytes == 128 * MIB
    assert Chip.named("v6e").memory_bytes == 32 * GIB
    assert Chip.named("h200").smem_bytes == 227 * 1024


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"chip='v6' is not known; use one of v4, v5e, v5p, v6e, v7x, a100"):
        Chip.named("v6")


def test_accelerators_have_one_name_each() -> None:
    names = [(chip.platform, chip.accelerator) for chip in RENTED]
    assert len(set(names)) == len(names)
    assert {chip.name for chip in CHIPS} <= {chip.name for chip in RENTED} | {"cpu"}
    assert {chip.name: chip.accelerator for chip in CHIPS}["v7x"] == "v7x"


def test_a_chip_without_figures_cannot_be_traced_for() -> None:
    with pytest.raises(ValueError, match=r"chip='l40s' is not known; use one of v4"):
        Chip.named("l40s")
