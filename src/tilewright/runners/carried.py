"""Base of the Ray and SkyPilot runners: the log of a job carries its output, files and exit code (see payload.py)."""

import re
from collections.abc import Iterator

from tilewright.runners.base import Collected, Job, Runner
from tilewright.runners.payload import LogReader


class LogCarried(Runner):
    """A runner that can read the raw log of a job, each time from its start."""

    prefix: re.Pattern[str] | None = None
    """What the runner prepends to each line."""

    def __init__(self) -> None:
        self._whole: dict[str, Collected] = {}

    def banner(self, job: Job) -> str | None:
        """A line that the runner itself writes into the log, at any place; None if it writes none."""
        return None

    def _raw_log(self, job: Job, *, follow: bool) -> Iterator[str]:
        raise NotImplementedError

    def logs(self, job: Job, *, follow: bool, skip: int = 0) -> Iterator[str]:
        reader = LogReader(job, self.prefix, self.banner(job))
        pieces = []
        for raw in self._raw_log(job, follow=follow):
            text = reader.feed(raw)
            pieces.append(text)
            if skip < len(text):
                yield text[skip:]
            skip = max(0, skip - len(text))
            if reader.exit_code is not None:
                break  # Only the runner's own lines follow, and it may take a while to close the log.
        if reader.exit_code is not None:
            self._whole[job.id] = Collected(
                log="".join(pieces), files=reader.files, exit_code=reader.exit_code, notes=tuple(reader.notes)
            )

    def collect(self, job: Job) -> Collected:
        if job.id not in self._whole:
            log = "".join(self.logs(job, follow=False))
            # The log of a job that was killed has no exit code.
            return self._whole.get(job.id) or Collected(log=log)
        return self._whole[job.id]

    def ended(self, job: Job) -> bool:
        return job.id in self._whole or super().ended(job)
