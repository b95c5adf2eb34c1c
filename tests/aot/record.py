"""Record the dumps that test_schedule.py reads: `uv run python -m tests.aot.record`, where libtpu is set up.

Only what the parser reads is kept, without the paths of the machine that it was recorded on.
"""

import json
import re
import shutil
from pathlib import Path

from tests.aot.kernels import RECORDED
from tilewright.aot import compiler
from tilewright.aot.schedule import dumped_kernels

DUMPS = Path(__file__).parent / "dumps"


def main() -> None:
    """Compile each kernel, and keep what the compiler dumped of it."""
    read = compiler._schedules

    for name, (function, args, chip) in RECORDED.items():
        folder = DUMPS / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

        def keep(kernels, dumps: Path, of, folder: Path = folder):
            wanted = [name for name in dumped_kernels(dumps) if kernels[0].name in name]
            for path in [*dumped_kernels(dumps)[wanted[0]], *dumps.glob("*vmem_report.html")]:
                text = re.sub(r"/[\w./-]+\.py", "kernel.py", path.read_text(errors="replace"))
                if path.suffix == ".html":  # The data alone, not the page around it.
                    data = text[text.index("const DATA =") + len("const DATA =") :].lstrip()
                    text = f"const DATA ={json.dumps(json.JSONDecoder().raw_decode(data)[0], indent=1)};\n"
                (folder / re.sub(r"^\d+", "0", path.name)).write_text(text)
            return read(kernels, dumps, of)

        compiler._schedules = keep
        report = compiler.compile(function, *args, chip=chip, use_cache=False)
        print(name, report.ok, report.cause, report.compiler, [kernel.schedule for kernel in report.kernels])


if __name__ == "__main__":
    main()
