"""`tilewright`: the verbs of the workbench, and how their errors are printed."""

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Annotated, Any

import jax
import typer
from rich.markup import escape

from tilewright.cli.bench import bench
from tilewright.cli.bench_model import Verbs, bench_model
from tilewright.cli.check import check
from tilewright.cli.compile import compile_verb
from tilewright.cli.doctor import doctor
from tilewright.cli.generate import generate
from tilewright.cli.ops import ops
from tilewright.cli.plan import plan
from tilewright.cli.profile import profile
from tilewright.cli.remote import app as remote
from tilewright.cli.report import report
from tilewright.cli.run import run
from tilewright.cli.scaffold import scaffold
from tilewright.cli.screen import as_mistake, console
from tilewright.cli.stalls import stalls
from tilewright.cli.tables import tables
from tilewright.cli.train import train
from tilewright.cli.tune import tune
from tilewright.cli.tuned import tuned
from tilewright.core.tuned import DamagedTableWarning
from tilewright.core.version import __version__

app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="""The bench that JAX kernels for TPU and GPU are made on.

**List** the ops and what runs here: `tilewright ops`

**Look** at this machine, and what mends what it lacks: `tilewright doctor`

**Check** values and gradients against the oracle: `tilewright check linear_cross_entropy`

**Time** implementations side by side: `tilewright bench linear_cross_entropy --grad --plot out.png`, and other
libraries' kernels on the same inputs: `tilewright bench kda --against fla`

**Profile** an op, a script or a training run in its steady state: `tilewright profile linear_cross_entropy --grad`

**See** where the warps of a GPU kernel wait, from what Nsight Compute sampled: `tilewright stalls export.csv`

**Time** a whole model, training and generating: `tilewright bench model qwen3-1.7b`

**Compile** an op's TPU kernels for every TPU, with none attached: `tilewright compile linear_cross_entropy --grad`

**Plan** a model's step on devices that are not there, memory and time: `tilewright plan qwen3-8b --chip v6e --topology 4x4`

**Tune** an op's block sizes, with every result checked: `tilewright tune matmul --budget 10m`, and show what is tuned:
`tilewright tuned`

**Report** what was measured, estimated and tuned, as one page: `tilewright report results -o results/report`

**Start** a new op from a working one whose tests pass: `tilewright new my_op`

**Write** the tables of the documentation from the records of measurements: `tilewright tables`

**Generate** text from a checkpoint: `tilewright generate Qwen3-0.6B --prompt "Once upon a time"`

**Train** a language model, or fine-tune one: `tilewright train examples/tiny_hybrid.toml`

**Run** any command here, on a rented TPU or GPU, or on a Ray cluster: `tilewright run --on sky:mine -- COMMAND`

**Rent**, watch and release machines: `tilewright remote --help`

Every verb has its own `--help`. On a machine without the chip, check runs TPU and GPU kernels in their interpreters;
bench times only what the device can run.
""",
)


def _print_version(asked: bool) -> bool:
    if asked:
        print(f"tilewright {__version__}, jax {jax.__version__}")
        raise typer.Exit
    return asked


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the versions, and exit.")
    ] = False,
) -> None:
    """Has no effect but that of its options."""


app.command("ops")(ops)
app.command("doctor")(doctor)
app.command("check")(check)
app.command("bench")(bench)
app.command("bench model")(bench_model)
app.command("compile")(compile_verb)
app.command("plan")(plan)
app.command("tune")(tune)
app.command("tuned")(tuned)
app.command("profile")(profile)
app.command("stalls")(stalls)
app.command("report")(report)
app.command("new")(scaffold)
app.command("tables")(tables)
app.command("generate")(generate)
app.command("train")(train)
app.command("run", context_settings={"allow_interspersed_args": False})(run)
app.add_typer(remote, name="remote")


def main() -> None:
    """Runs a verb. A wrong argument, a full disk and a missing device are one line on stderr and exit code 2.

    Any other error keeps its traceback.
    """
    try:
        with _plain_warnings():
            app(prog_name="tilewright")  # As `python -m tilewright`, too: completion scripts have its name in them.
    except Exception as error:
        if (line := as_mistake(error)) is None:
            raise
        console(stderr=True).print(f"[bold red]error:[/] {escape(line)}", highlight=False, soft_wrap=True)
        sys.exit(2)


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Prints what is wrong with a tuned table once, as a line. The caller's source line is of no use on a command line."""
    before, told = warnings.showwarning, set[str]()

    def show(message: Warning | str, category: type[Warning], *where: Any, **given: Any) -> None:
        if not issubclass(category, DamagedTableWarning):
            before(message, category, *where, **given)
        elif (text := str(message)) not in told:
            told.add(text)
            console(stderr=True).print(f"[yellow]warning:[/] {escape(text)}", highlight=False, soft_wrap=True)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


if __name__ == "__main__":
    main()
