"""The script that runs a command on another machine, and the reader of its log.

A log is the one thing that every remote service returns, at any time, also after the job. So the log carries all there
is: a mark with the job's id where the command starts, the unchanged output of the command, the files to fetch in base64,
and the command's exit code. Nothing else has to come back: no ssh, no shared disk, and no exit code from the runner
(SkyPilot reports 100 for every failure).
"""

import base64
import binascii
import re
import shlex
from collections.abc import Mapping

from tilewright.runners.base import Job

HAVE_UV = "command -v uv >/dev/null || python3 -m pip install --quiet --user uv"
"""Installs uv where it is missing. `uv run` then installs everything that a job needs."""
FETCH_LIMIT_BYTES = 64 * 2**20
"""The most bytes of packed files that a log carries."""
_MARK = "@tilewright:{id}:"


def script(job: Job, *, env_file: str | None = None) -> str:
    """A bash script that runs the job's command in the current directory. It contains no values of `job.env`.

    The variables come from `env_file`, which the script deletes as soon as it has read it.
    """
    mark = _MARK.format(id=job.id)
    lines = ["set -u", 'export PATH="$HOME/.local/bin:$PATH"']
    if env_file is not None:
        path = shlex.quote(env_file)
        lines += [f"set -a; . {path} || exit; set +a; rm -f {path}"]
    # On a slice of several hosts every host runs this script; only the first prints marks.
    lines += [
        "rank=${SKYPILOT_NODE_RANK:-0}",
        f"[ $rank != 0 ] || echo {mark}begin",
        f"( exec {shlex.join(job.command)} ) 2>&1 </dev/null",
        "code=$?",
    ]
    if job.fetch:
        paths = shlex.join(f"./{path}" for path in job.fetch)
        lines += [
            "if [ $rank = 0 ]; then",
            "  there=()",
            f"  for path in {paths}; do",
            f'    if [ -e "$path" ]; then there+=("$path"); else echo "{mark}missing $path"; fi',
            "  done",
            "  if [ ${#there[@]} -gt 0 ]; then",
            '    packed=$(mktemp); tar czf "$packed" "${there[@]}"; size=$(wc -c <"$packed")',
            f"    if [ $size -gt {FETCH_LIMIT_BYTES} ]; then echo {mark}large $size",
            f'    else echo {mark}files; base64 -w 1000 "$packed"; echo {mark}packed; fi',
            '    rm -f "$packed"',
            "  fi",
            "fi",
        ]
    lines += [f"[ $rank != 0 ] || echo {mark}exit $code", "exit $code"]
    return "\n".join(lines) + "\n"


def environment_file(env: Mapping[str, str]) -> str:
    """`env` as assignments that bash can source."""
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in sorted(env.items()))


class LogReader:
    """Extracts the output of the command from the raw log of a remote job, which arrives in pieces.

    `prefix` is what the runner prepends to each line; it is removed. `banner` is a line that the runner itself writes.
    """

    def __init__(self, job: Job, prefix: re.Pattern[str] | None = None, banner: str | None = None):
        self._mark = _MARK.format(id=job.id)
        self._prefix = prefix
        self._banner = banner
        self._line = ""
        self._carried = ""
        self._began = False
        self._packing: list[str] | None = None
        self.exit_code: int | None = None
        self.files: bytes | None = None
        self.notes: list[str] = []

    def feed(self, text: str) -> str:
        """The output that this piece completes: whole lines, since a mark may be at the end of a line."""
        *lines, self._line = (self._line + text).split("\n")
        return "".join(self._take(line) for line in lines)

    def _take(self, line: str) -> str:
        if self._prefix is not None:
            line = self._prefix.sub("", line, count=1)
        line, self._carried = self._carried + line, ""
        if self._banner is not None and line.endswith(self._banner):
            # The newline belongs to the banner: the text before it continues on the next line.
            self._carried = line.removesuffix(self._banner)
            return ""
        before, mark, after = line.partition(self._mark)
        if not mark:
            if self._packing is not None:
                self._packing.append(line)
                return ""
            return f"{line}\n" if self._began and self.exit_code is None else ""
        word, _, rest = after.strip().partition(" ")
        if word == "begin":
            self._began = True
            return ""
        if word == "files":
            self._packing = []
        elif word == "packed":
            self._unpack()
        elif word == "exit" and rest.isdigit():
            self.exit_code = int(rest)
        elif word == "missing":
            self.notes.append(f"--fetch {rest.removeprefix('./')}: the job made no such file")
        elif word == "large" and rest.isdigit():
            mib = int(rest) / 2**20
            self.notes.append(
                f"--fetch: {mib:.0f} MiB is more than the {FETCH_LIMIT_BYTES >> 20} MiB that a log carries; copy the "
                "files to a bucket in the command, or fetch less"
            )
        # The last line of a command may have no newline, and then the mark follows on the same line.
        return before

    def _unpack(self) -> None:
        try:
            self.files = base64.b64decode("".join(self._packing or []), validate=True)
        except binascii.Error:
            self.notes.append("--fetch: the files arrived damaged; read the log again with `tilewright remote wait`")
        self._packing = None
