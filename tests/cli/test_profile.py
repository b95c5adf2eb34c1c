"""`tilewright profile`: an op, a script and a training run in their steady state, and how it refuses others."""

import re
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.cli.test_cli import assert_refused, ran
from tilewright.core.case import Work
from tilewright.workbench import profile
from tilewright.workbench.profile import trace_steps

SCRIPT = """
import sys, time
import jax, jax.numpy as jnp
until = time.monotonic() + float(sys.argv[1])
step = jax.jit(lambda x: jnp.sort(x @ x))
x = jnp.ones((64, 64))
while time.monotonic() < until:
    jax.block_until_ready(step(x))
print("as", __name__, sys.argv)
sys.exit(int(sys.argv[2]))
"""

RAISES = """import json
try:
    json.loads('')
except ValueError:
    raise OSError(2, 'mine')
"""


@pytest.mark.slow
def test_an_op_is_traced_without_its_compilation(tmp_path: Path) -> None:
    done = ran("profile", "rms_norm", "--case", "odd", "--implementation", "xla", "--steps", "4", cwd=tmp_path)
    assert done.code == 0, done
    assert "rms_norm odd bfloat16, forward, xla, on cpu" in done.flat
    assert re.search(r"XLA's threads were busy for .* of .* \(\d+\.\d%\); this package's kernels had 0\.0%", done.flat)
    assert re.search(r"useful work per step, over the .* GFLOP/s, .* GB/s", done.flat)
    (trace,) = (tmp_path / "results" / "profile").glob("rms_norm-*/plugins/profile/*/*.trace.json.gz")
    assert f"Perfetto: open {trace.relative_to(tmp_path)}" in done.flat
    assert list(trace.parent.glob("*.xplane.pb"))


def test_the_table_shows_kernels_and_rates_where_the_trace_has_them(tmp_path: Path, monkeypatch: Any) -> None:
    """As on a TPU, whose trace has the FLOPs of each operation."""
    from tilewright.cli import profile as verb

    named = {"name": "delta_rule_forward.1", "calls": 40, "seconds": 2e-3, "ours": True, "flops": 8e9, "bytes": 2e9}
    small = [profile.Operation(f"copy.{n}", 4, 1e-5, False, None, None) for n in range(5)]
    made = profile.Profile(
        folder=tmp_path,
        platform="tpu",
        devices=2,
        steps=4,
        span_s=3e-3,
        busy_s=2.05e-3,
        operations=(profile.Operation(**named), *small),
        gaps=(),
        work=Work(1e9, 1e6),
    )
    (tmp_path / "a.xplane.pb").touch()
    monkeypatch.setattr(verb, "trace_calls", lambda *_: made)
    done = ran("profile", "rms_norm", "--case", "odd", "--top", "2", cwd=tmp_path)
    assert done.code == 0, done
    assert re.search(r"delta_rule_forward.1 +│ tilewright │ +10 │ +500 us │ +97.6% │ +4 TFLOP/s │ +1 TB/s", done.stdout)
    assert re.search(r"4 more +│ +│ +4 │ +10.0 us │ +2.0% │ +- │ +-", done.stdout)
    assert "this package's kernels had 97.6% of the operations' time" in done.flat
    assert "2 devices worked; the figures are of the busiest" in done.flat


@pytest.mark.slow
def test_steps_of_a_loop_are_traced_after_those_that_warm_it_up(tmp_path: Path) -> None:
    made: list[int] = []
    double = jax.jit(lambda x: x + x)

    def steps() -> Any:
        x = jnp.ones(8)
        while True:
            x = double(x)
            made.append(len(made))
            yield

    found = trace_steps(steps(), tmp_path, 5)
    assert len(made) == profile.WARM_UP_CALLS + 5
    assert sum(operation.calls for operation in found.operations) == 5


@pytest.mark.slow
def test_a_script_runs_as_itself_and_its_steady_state_is_traced(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    words = ("profile", "job.py", "--settle", "0.1", "--seconds", "0.2", "-o", "out")
    done = ran(*words, "--", "1.5", "3", cwd=tmp_path)
    assert done.code == 3, done
    assert "as __main__ ['job.py', '1.5', '3']" in done.stdout
    assert "the script ended with 3" in done.stderr
    assert "traced 0.2 s of the steady state" in done.stderr
    assert "sort" in done.stdout
    assert "calls in the trace" in done.stdout
    assert len(list((tmp_path / "out").rglob("*.xplane.pb"))) == 1
    raised = ran(*words, "--", "1.5", "no number", cwd=tmp_path)
    assert raised.code == 1
    assert raised.stderr.endswith("ValueError: invalid literal for int() with base 10: 'no number'\n")
    assert "calls in the trace" in raised.stdout
    done = ran(*words, "--settle", "60", "--", "0.1", "0", cwd=tmp_path)
    assert done.code == 1
    assert "nothing traced: job.py ended before 60 s had passed in which it compiled nothing" in done.flat


def test_a_script_that_raises_shows_its_own_traceback_only(tmp_path: Path) -> None:
    (tmp_path / "raises.py").write_text(RAISES)
    done = ran("profile", "raises.py", cwd=tmp_path)
    first, second = done.stderr.split("\nDuring handling of the above exception, another exception occurred:\n\n")
    begin = 'Traceback (most recent call last):\n  File "raises.py", line {}, in <module>\n'
    assert done.code == 1
    assert first.startswith(f"{begin.format(3)}    json.loads('')\n")
    assert re.fullmatch(f"{re.escape(begin.format(5))}.*\nFileNotFoundError: .* mine\n", second, re.DOTALL), second
    (tmp_path / "open.py").write_text("x = (\n")
    done = ran("profile", "open.py", cwd=tmp_path)
    assert (done.code, done.stderr.splitlines()[0]) == (1, '  File "open.py", line 1')
    assert done.stderr.endswith("\nSyntaxError: '(' was never closed\n")


def test_the_exit_code_of_a_script_is_that_of_the_command(tmp_path: Path) -> None:
    for ended, code in {"7": 7, "'no data'": 1, "": 1}.items():  # Without a trace, an end without an error is one, too.
        (tmp_path / "ends.py").write_text(f"import sys\nsys.exit({ended})\n")
        done = ran("profile", "ends.py", cwd=tmp_path)
        assert (done.code, "nothing traced: ends.py compiled nothing with JAX" in done.flat) == (code, True), done
    assert not list((tmp_path / "results" / "profile").iterdir())


def test_a_trace_that_a_compilation_overlaps_is_replaced(tmp_path: Path) -> None:
    """JAX reports a compilation when it ends: one that has begun before the trace shows only then."""
    told: list[str] = []
    step = jax.jit(lambda x: x + 1)
    with profile._SteadyTrace(tmp_path, settle_s=0.0, seconds=0.05, told=told.append) as steady:
        steady._note("/jax/core/compile/backend_compile_duration", 0.0)
        waiting = threading.Event()
        for number in range(400):
            jax.block_until_ready(step(jnp.float32(number)))
            waiting.wait(0.005)
            if len(told) == 1:
                steady._note("/jax/core/compile/backend_compile_duration", 60.0)
            if len(told) == 3:
                break
    assert [line.split()[0] for line in told] == ["traced", "a", "traced"]
    assert steady.taken is not None
    assert len(list(tmp_path.rglob("*.xplane.pb"))) == 1


@pytest.mark.slow
def test_training_steps_are_traced_and_the_run_is_left_alone(tmp_path: Path) -> None:
    pytest.importorskip("optax")
    pytest.importorskip("grain")
    pytest.importorskip("orbax.checkpoint")
    from tests.cli.test_train import written

    written(tmp_path)
    done = ran("profile", "train", "run.toml", "--steps", "2", "-o", "out", cwd=tmp_path)
    assert done.code == 0, done
    assert "training run.toml, 64 tokens per step in float32, on cpu" in done.flat
    assert re.search(r"useful work per step, over the .* GFLOP/s", done.flat)
    assert list((tmp_path / "out").rglob("*.xplane.pb"))
    assert not (tmp_path / "runs").exists()


def test_a_wrong_word_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    assert_refused(
        (("profile", "softmax"), "softmax is neither an op (`tilewright ops` lists them), nor a file, nor train"),
        (("profile", "rms_norm", "more"), "rms_norm is an op and takes no words: more"),
        (
            ("profile", "rms_norm", "--case", "odd,heads_of_64"),
            "--case odd,heads_of_64 names several; a profile is of one",
        ),
        (("profile", "rms_norm", "--implementation", "cuda"), "--implementation cuda is not known; use one of"),
        (("profile", "job.py", "--grad"), "--grad is for ops; leave it out, or name an op"),
        (("profile", "job.py", "--settle", "nan"), "--settle nan is not a number of seconds"),
        (("profile", "train"), "`tilewright profile train` takes one TOML file"),
        (("profile", "rms_norm", "-o", "/proc/none"), "--out /proc/none cannot be written"),
        cwd=tmp_path,
    )
