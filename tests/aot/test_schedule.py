"""The dump parser, over recorded dumps of our own small kernels (see record.py): it runs where libtpu is absent."""

from pathlib import Path

import pytest

from tests.aot.record import DUMPS
from tilewright.aot.compiler import _dumped_names
from tilewright.aot.program import UNNAMED, Kernel
from tilewright.aot.schedule import NotReadable, Schedule, custom_calls, dumped_kernels, read_schedule, read_vmem


def recorded(name: str, *, grid_steps: int, mxu_rows_per_cycle: int = 4) -> Schedule:
    ((bundles, utilization),) = dumped_kernels(DUMPS / name).values()
    return read_schedule(
        name,
        bundles.read_text(),
        utilization.read_text(),
        grid_steps=grid_steps,
        mxu_rows_per_cycle=mxu_rows_per_cycle,
    )


def test_a_blocked_matmul_by_hand() -> None:
    """128^3 multiply-adds on four MXUs of 128 x 128: 32 cycles."""
    schedule = recorded("matmul-v5e", grid_steps=4 * 3 * 2)
    assert schedule.mxu_cycles == 128**3 / (4 * 128 * 128)
    assert schedule.bundles_total == 212
    # The blocks of the first and the last step of an axis are not part of a step.
    assert schedule.occasional == 28
    assert 32 < schedule.bundles < schedule.bundles_total - schedule.occasional
    assert schedule.unknown == ()
    assert schedule.bottleneck == "scalar"
    assert schedule.busy["MXU"] == pytest.approx(32 / schedule.bundles)
    assert schedule.spill_stores == 0
    assert schedule.stores == 128 * 128 // (8 * 128)


def test_an_inner_loop_counts_as_often_as_its_exit_test_says() -> None:
    """6 turns of one exp on one register: the transcendental unit is used 6 times a step."""
    schedule = recorded("looped-v6e", grid_steps=8)
    assert schedule.busy["EUP"] * schedule.bundles == pytest.approx(6)
    assert schedule.bundles > schedule.bundles_total
    assert schedule.unknown == ()


def test_a_loop_that_depends_on_data_is_said_to() -> None:
    schedule = recorded("looped_by_data-v6e", grid_steps=8)
    assert schedule.unknown == ("a loop of 8 bundles runs as often as data says",)


def test_vmem_by_name() -> None:
    ((name, pieces),) = ((name, p) for name, p in read_vmem(DUMPS / "matmul-v5e").items() if name.startswith("matmul"))
    assert name == "matmul.1"
    assert {piece.what: piece.bytes for piece in pieces} == {
        "scratch operand f32[128,128]": 128 * 128 * 4,
        "input 0, window bf16[128,128], 2 buffers": 2 * 128 * 128 * 2,
        "input 1, window bf16[128,128], 2 buffers": 2 * 128 * 128 * 2,
        "output 0, window bf16[128,128], 2 buffers": 2 * 128 * 128 * 2,
    }


def test_a_dump_in_another_form_is_refused_not_guessed(tmp_path: Path) -> None:
    ((bundles, utilization),) = dumped_kernels(DUMPS / "looped-v6e").values()
    with pytest.raises(NotReadable, match=r"no bundles"):
        read_schedule("x", "nothing\n", utilization.read_text(), grid_steps=1, mxu_rows_per_cycle=4)
    with pytest.raises(NotReadable, match=r"not in the known form"):
        read_schedule("x", bundles.read_text(), "nothing\n", grid_steps=1, mxu_rows_per_cycle=4)
    shorter = utilization.read_text().rsplit("\n", 2)[0]
    with pytest.raises(NotReadable, match=r"88 bundles have 87 rows"):
        read_schedule("x", bundles.read_text(), shorter, grid_steps=1, mxu_rows_per_cycle=4)
    straight = bundles.read_text().replace("sbr.rel", "gone")
    with pytest.raises(NotReadable, match=r"the grid has 8 steps and the schedule has no loop"):
        read_schedule("x", straight, utilization.read_text(), grid_steps=8, mxu_rows_per_cycle=4)
    assert dumped_kernels(tmp_path) == {}
    assert read_vmem(tmp_path) == {}


def test_the_programs_calls_in_its_order(tmp_path: Path) -> None:
    (tmp_path / "17-TLP-hlo.txt").write_text(
        "  %pad.2 = bf16[8]{0} fusion(%p.1), kind=kLoop\n"
        '  %outer.3 = bf16[8]{0:T(8,128)} custom-call(%pad.2), custom_call_target="tpu_custom_call", metadata={}\n'
        '  %sharding.4 = bf16[8]{0} custom-call(%outer.3), custom_call_target="Sharding"\n'
        '  ROOT %outer.5 = bf16[8]{0} custom-call(%outer.3), custom_call_target="tpu_custom_call"\n'
    )
    assert custom_calls(tmp_path) == ["outer.3", "outer.5"]


def test_kernels_without_a_name_are_the_calls_left_over() -> None:
    """JAX's own flash attention gives its kernels none: the compiler calls them after the function."""

    def named(*names: str) -> tuple[Kernel, ...]:
        return tuple(Kernel(name, (1,), False, None, None) for name in names)

    dumped = ["TLP", "fusion.1", "jvp_matmul_.2", "outer.3", "outer.5"]
    calls = ["outer.3", "jvp_matmul_.2", "outer.5"]
    of = named(UNNAMED, "matmul", UNNAMED)
    assert _dumped_names(of, dumped, calls) == {0: "outer.3", 1: "jvp_matmul_.2", 2: "outer.5"}
    # With one call too many nothing tells them apart; and a kernel with a name is never taken for another.
    assert _dumped_names(named(UNNAMED, "matmul"), dumped, calls) == {1: "jvp_matmul_.2"}
    assert _dumped_names(named("softmax"), dumped, ["outer.3"]) == {}
