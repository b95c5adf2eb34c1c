"""The files of a checkout that are uploaded: tracked files and new files, never files that git ignores.

The files are copied to a staging directory, which the runner uploads. So every runner uploads the same files, however
it treats ignore files, and git's history stays here. A job's environment variables travel as a file that the job
deletes when it starts, and not in a runner's database, dashboard or log.
"""

import contextlib
import fnmatch
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tilewright.runners import payload
from tilewright.runners.base import Job

JOB_FILES = ".tilewright_job"
_NAMED_AT_MOST = 3


@contextlib.contextmanager
def staged(workdir: Path, job: Job | None = None) -> Iterator[Path]:
    """A temporary directory with the files of `workdir` to upload and, for a job, its script."""
    files = shipped_files(workdir)
    with tempfile.TemporaryDirectory(prefix="tilewright-") as name:
        stage = Path(name)
        for file in files:
            (stage / file).parent.mkdir(parents=True, exist_ok=True)
            _copy(workdir / file, stage / file)
        if job is not None:
            own = stage / JOB_FILES
            own.mkdir(exist_ok=True)
            environment = f"{JOB_FILES}/{job.id}.env" if job.env else None
            (stage / script_path(job)).write_text(payload.script(job, env_file=environment))
            if environment:
                (stage / environment).touch(mode=0o600)
                (stage / environment).write_text(payload.environment_file(job.env))
        yield stage


def script_path(job: Job) -> str:
    """The path of the job's script, relative to the uploaded directory."""
    return f"{JOB_FILES}/{job.id}.sh"


def _copy(source: Path, to: Path) -> None:
    try:
        os.link(source, to, follow_symlinks=False)  # Takes no space, and keeps the mtime that rsync compares.
    except OSError:
        shutil.copy2(source, to, follow_symlinks=False)


def shipped_files(workdir: Path) -> list[str]:
    """The tracked files, and the new files that git does not ignore, relative to `workdir`."""
    _refuse_leaky_skyignore(workdir)
    listed = _git(workdir, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    paths = dict.fromkeys(name for name in listed.split("\0") if name)
    # git also lists tracked files that were deleted, and submodules, which are directories.
    return [name for name in paths if (workdir / name).is_symlink() or (workdir / name).is_file()]


def _refuse_leaky_skyignore(workdir: Path) -> None:
    """Raises where .skyignore, which SkyPilot reads instead of .gitignore, would let ignored files be uploaded."""
    skyignore = workdir / ".skyignore"
    if not skyignore.exists():
        return
    lines = [line.strip() for line in skyignore.read_text().splitlines()]
    patterns = [line for line in lines if line and not line.startswith("#")]
    ignored = _git(workdir, "ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory").split("\0")
    leaks = [name for name in ignored if name and not _excluded(name.rstrip("/"), patterns)]
    if leaks:
        more = f" and {len(leaks) - _NAMED_AT_MOST} more" if len(leaks) > _NAMED_AT_MOST else ""
        raise ValueError(
            f".skyignore replaces .gitignore for SkyPilot, and would upload what git ignores: "
            f"{', '.join(leaks[:_NAMED_AT_MOST])}{more}; remove .skyignore, or name them in it"
        )


def _excluded(path: str, patterns: list[str]) -> bool:
    """Whether a pattern excludes the path, by rsync's rules: a leading slash anchors it at the top, otherwise it
    matches at any depth; a directory includes everything below it.
    """
    parts = path.split("/")
    prefixes = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    for pattern in patterns:
        plain = pattern.rstrip("/")
        if plain.startswith("/"):
            tried = prefixes
            plain = plain[1:]
        else:
            tried = [*prefixes, *parts]
        if any(fnmatch.fnmatchcase(each, plain) for each in tried):
            return True
    return False


def _git(workdir: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(workdir), *arguments], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ValueError("git is not installed; it is needed to know which files not to upload") from error
    if done.returncode:
        why = done.stderr.strip().splitlines()[0] if done.stderr.strip() else f"exit code {done.returncode}"
        raise ValueError(
            f"--workdir {workdir}: git cannot tell which files not to upload ({why}); where there is no checkout, run "
            "`git init` first, with a .gitignore for the files that must not be uploaded"
        )
    return done.stdout
