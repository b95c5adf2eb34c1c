"""What runs on the other machine around a command, and how its log is read.

A log is the one thing that every remote gives back, to whoever asks, also after the job: so the log carries all there is.
The script prints a mark with the job's id where the command begins; what the command printed, as it printed it; the files
to bring back, in base64; and the command's exit code. Nothing else is needed on the way back: no ssh, no shared disk, and
no runner's own idea of an exit code (SkyPilot answers 100 for every failure).
"""

import base64
import binascii
import re
import shlex
from collections.abc import Mapping

from tilewright.runners.base import Job

HAVE_UV = "command -v uv >/dev/null || python3 -m pip install --quiet --user uv"
"""What a machine needs before its first job; `uv run` does the rest."""
FETCH_LIMIT_BYTES = 64 * 2**20
"""Of the packed files: a log is no place for more."""
_MARK = "@tilewright:{id}:"


def script(job: Job, *, env_file: str | None = None) -> str:
    """A bash script that runs the job's command in the current directory. It holds no value of `job.env`.

    `env_file` has its variables; it is removed as soon as it is read.
    """
    mark = _MARK.format(id=job.id)
    lines = ["set -u", 'export PATH="$HOME/.local/bin:$PATH"']
    if env_file is not None:
        path = shlex.quote(env_file)
        lines += [f"set -a; . {path} || exit; set +a; rm -f {path}"]
    # On a slice of several hosts every host runs this; the first one speaks for the job.
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
    """`env` as a file that bash reads."""
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in sorted(env.items()))


class LogReader:
    """Takes the raw log of a remote job in pieces, and gives the command's own output.

    `prefix`: what the runner puts before each line, to be taken off. `banner`: a line of the runner's own.
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
        """What of the command's output is complete now: whole lines, since a mark may be at the end of one."""
        *lines, self._line = (self._line + text).split("\n")
        return "".join(self._take(line) for line in lines)

    def _take(self, line: str) -> str:
        if self._prefix is not None:
            line = self._prefix.sub("", line, count=1)
        line, self._carried = self._carried + line, ""
        if self._banner is not None and line.endswith(self._banner):
            # Its end of line is its own: what stood before it goes on in the next.
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
                f"--fetch: {mib:.0f} MiB is more than the {FETCH_LIMIT_BYTES >> 20} MiB that come back in a log; copy "
                "them to a bucket in the command, or fetch less"
            )
        # A command's last line may have had no end.
        return before

    def _unpack(self) -> None:
        try:
            self.files = base64.b64decode("".join(self._packing or []), validate=True)
        except binascii.Error:
            self.notes.append("--fetch: the files came back damaged; ask for the log again: `tilewright remote wait`")
        self._packing = None
