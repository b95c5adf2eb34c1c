"""Jobs on an existing Ray cluster, through Ray's Jobs API.

Each job uploads its own working directory, so there is nothing to sync and two jobs never share files. This runner
starts and stops no machines: `ray up`, KubeRay or SkyPilot do that. Anyone who can reach a Ray head can run anything on
it, so a token is required for every address except loopback. The token is sent as a header and never printed.
"""

import asyncio
import contextlib
import importlib
import ipaddress
import logging
import os
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tilewright.runners.accelerator import Accelerator
from tilewright.runners.base import Job, LostConnection, NotInstalled, RunnerError, State, Status
from tilewright.runners.carried import LogCarried
from tilewright.runners.upload import script_path, staged

_STATES = {
    "PENDING": State.PENDING,
    "RUNNING": State.RUNNING,
    "STOPPED": State.CANCELLED,
    "SUCCEEDED": State.SUCCEEDED,
    "FAILED": State.FAILED,
}
_AGENT_S = 60.0
_TOKEN_REMEDY = (
    "write the cluster's token to ~/.ray/auth_token, or name its file in RAY_AUTH_TOKEN_PATH (`ray get-auth-token` on the "
    "head prints it)"
)


class RayRunner(LogCarried):
    """Commands as Ray jobs. `address` is HOST:PORT of the head's dashboard, or its http(s) address."""

    cannot = {  # noqa: RUF012
        "plan": "rents no machines; use --on sky:CLUSTER, or `ray up` for a Ray cluster",
        "sync": "has nothing to sync: each Ray job uploads its own files when it is submitted",
        "down": "was not started by this runner; stop the cluster with `ray down` or `ray stop`",
    }

    def __init__(self, address: str):
        super().__init__()
        self.target = f"ray:{address}"
        url = urllib.parse.urlsplit(address if "://" in address else f"http://{address}")
        try:
            fits = url.scheme in ("http", "https") and url.hostname and url.port
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                f"--on ray:{address} is not an address; use ray:HOST:PORT of the head's dashboard, such as "
                "ray:127.0.0.1:8265"
            )
        self.url = f"{url.scheme}://{url.netloc}"
        self._token = _token()
        loopback = _is_loopback(url.hostname or "")
        if self._token is None and not loopback:
            raise RunnerError(
                f"--on ray:{address} is not this machine and there is no token: without one, anyone who reaches a Ray "
                f"head can run anything on it; {_TOKEN_REMEDY}"
            )
        if self._token is not None and not loopback and url.scheme == "http":
            self.notice = f"{self.url} is not encrypted, so the token is sent as plain text; use an ssh tunnel or https"
        self._connected: Any = None

    @property
    def _client(self) -> Any:
        if self._connected is None:
            try:
                ray_jobs = importlib.import_module("ray.job_submission")
            except ImportError as error:
                raise NotInstalled(
                    f"--on {self.target} needs Ray, which is not installed: pip install 'tilewright[ray]', or "
                    "uv sync --extra ray in a checkout"
                ) from error
            # These log every upload and every closed socket, and whole requests at debug level.
            for name in (
                "dashboard.modules.dashboard_sdk",
                "dashboard.modules.job.sdk",
                "_private.runtime_env.packaging",
            ):
                logging.getLogger(f"ray.{name}").setLevel(logging.WARNING)
            headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
            with self._one_line():
                self._connected = ray_jobs.JobSubmissionClient(self.url, headers=headers)
        return self._connected

    @contextlib.contextmanager
    def _one_line(self, job: Job | None = None) -> Iterator[None]:
        """Turns Ray's exceptions into a `RunnerError` of one line with the remedy."""
        aiohttp, requests, ray = (importlib.import_module(name) for name in ("aiohttp", "requests", "ray.exceptions"))
        try:
            yield
        except ray.AuthenticationError as error:
            if "Forbidden" in str(error):
                what = "refuses the token: it is wrong, or expired"
            else:
                what = "requires a token, and there is none"
            raise RunnerError(f"{self.target} {what}; {_TOKEN_REMEDY}") from None
        except aiohttp.WSServerHandshakeError as error:
            if error.status in (401, 403):
                raise RunnerError(
                    f"{self.target} refuses the token: it is wrong, or expired; {_TOKEN_REMEDY}"
                ) from None
            raise LostConnection(f"{self.target} returns no log at the moment (HTTP {error.status})") from None
        except (ConnectionError, requests.exceptions.RequestException, aiohttp.ClientError, TimeoutError) as error:
            raise LostConnection(
                f"{self.target} does not answer ({type(error).__name__}); is the head up, and its port reachable?"
            ) from None
        except RuntimeError as error:
            if isinstance(error, RunnerError):
                raise
            text = str(error)
            if job is not None and ("404" in text or "does not exist" in text):
                raise RunnerError(
                    f"{self.target} has no job {job.id}: the head was restarted since, or the job never reached it"
                ) from None
            if "WebSocket" in text:
                raise LostConnection(f"{self.target} closed the log of {job.id if job else 'a job'}") from None
            raise RunnerError(f"{self.target} refuses: {_first_line(text)}") from None

    def submit(self, job: Job) -> None:
        client = self._client
        resources = _resources(job.accelerator)
        deadline = time.monotonic() + _AGENT_S
        with staged(job.workdir, job) as stage, self._one_line(job):
            while True:
                try:
                    # Ray uses our id, so the journal finds the job even if this process is killed right now.
                    client.submit_job(
                        entrypoint=_entrypoint(job),
                        submission_id=job.id,
                        runtime_env={"working_dir": str(stage)},
                        metadata={"tilewright": "1"},
                        **resources,
                    )
                    return
                except RuntimeError as error:
                    # A head that has just started answers requests before it can run jobs.
                    if "No available agent" not in str(error) or time.monotonic() > deadline:
                        raise
                    time.sleep(1)

    def status(self, job: Job) -> Status:
        client = self._client
        with self._one_line(job):
            return _status(client.get_job_info(job.id))

    def jobs(self) -> list[tuple[str, Status]]:
        client = self._client
        with self._one_line():
            found = client.list_jobs()
        found = sorted(found, key=lambda info: info.start_time or 0, reverse=True)
        return [(info.submission_id or info.job_id, _status(info)) for info in found]

    def banner(self, job: Job) -> str | None:
        # Ray's supervisor writes this line while the job may already be writing.
        return f"Running entrypoint for job {job.id}: {_entrypoint(job)}"

    def _raw_log(self, job: Job, *, follow: bool) -> Iterator[str]:
        client = self._client
        with self._one_line(job):
            if not follow:
                yield client.get_job_logs(job.id)
                return
            # Every call starts at the beginning of the log; a reader that reconnects skips what it has.
            loop = asyncio.new_event_loop()
            lines = client.tail_job_logs(job.id)

            async def more() -> str | None:
                return await anext(lines, None)

            try:
                while True:
                    step = loop.create_task(more())
                    try:
                        text = loop.run_until_complete(step)
                    except KeyboardInterrupt:
                        step.cancel()  # Closes the connection properly.
                        with contextlib.suppress(asyncio.CancelledError):
                            loop.run_until_complete(step)
                        raise
                    if text is None:
                        return
                    yield text
            finally:
                loop.run_until_complete(lines.aclose())
                loop.close()

    def cancel(self, job: Job) -> bool:
        client = self._client
        with self._one_line(job):
            if not client.stop_job(job.id):
                return False
        self.wait(job, timeout_s=60)
        return True


def _entrypoint(job: Job) -> str:
    return f"bash {script_path(job)}"


def _status(info: Any) -> Status:
    state = _STATES[str(info.status.value)]
    # Ray reports FAILED for every code but 0. A missing exit code means that the driver was killed.
    return Status(state, info.driver_exit_code, _first_line(info.message or "") if state is not State.SUCCEEDED else "")


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:300] if text.strip() else ""


def _resources(accelerator: str | None) -> dict[str, Any]:
    """What the job reserves on the host where its command starts."""
    if accelerator is None:
        return {}
    found = Accelerator.parse(accelerator)
    if found.chip.platform == "gpu":
        # Every node has a resource with the name of its GPU, without the size of its memory: asking for a small
        # fraction of it selects the kind.
        resource = f"accelerator_type:{found.kind.partition('-')[0]}"
        return {"entrypoint_num_gpus": found.count, "entrypoint_resources": {resource: 0.001}}
    resources = {"TPU": float(found.per_host)}
    if found.count > found.per_host:
        # The command starts on the first host of a slice; `ray.util.tpu` reaches the other hosts from there.
        resources[f"TPU-{found.name.removeprefix('tpu-')}-head"] = 1.0
    return {"entrypoint_resources": resources}


def _token() -> str | None:
    """The token, from the places where Ray itself looks, in Ray's order."""
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    try:
        return path.read_text().strip() or None
    except FileNotFoundError:
        if named:
            raise RunnerError(f"RAY_AUTH_TOKEN_PATH={named} is not a file; {_TOKEN_REMEDY}") from None
        return None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
