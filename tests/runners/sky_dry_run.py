"""Run by test_skypilot.py in a process with its own HOME: prints one plan over the fixture catalog per line, as JSON.

SkyPilot's optimizer, catalogs and validation are the real ones. Its server is left out: its requests are called in this
process. No account is needed, since no cloud is queried.
"""

import contextlib
import io
import json
import logging
import sys
from pathlib import Path

import sky
import sky.core
from sky import global_user_state
from sky.clouds import CloudCapability

from tilewright.runners.base import Rental, RunnerError
from tilewright.runners.skypilot import SkyRunner

ask = json.loads(sys.argv[1])
if ask["clouds"]:
    global_user_state.set_allowed_clouds(ask["clouds"], "default")
    global_user_state.set_enabled_clouds(ask["clouds"], CloudCapability.COMPUTE, "default")


def stream_and_get(dag: sky.Dag, output_stream: io.TextIOBase) -> None:
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("sky").addHandler(handler)
    logging.getLogger("sky").setLevel(logging.INFO)
    with contextlib.redirect_stdout(io.StringIO()):
        sky.core.optimize(dag)
    logging.getLogger("sky").removeHandler(handler)
    output_stream.write(said.getvalue())


sky.status = lambda names: []
sky.get = lambda answer: answer
sky.optimize = lambda dag: dag
sky.stream_and_get = stream_and_get
for name in ask["rentals"]:
    rental = {**name, "template": Path(name["template"]) if name.get("template") else None}
    try:
        runner = SkyRunner("test")
        (resources,) = runner._task(Rental(**rental)).resources
        plan = runner.plan(Rental(**rental))
        arguments, stops = resources.accelerator_args, resources.autostop_config
        told = {
            "runtime": (arguments or {}).get("runtime_version"),
            "stops": [stops.enabled, stops.down, stops.idle_minutes],
        }
        print(json.dumps({"price": plan.dollars_per_hour, "lines": plan.lines, **told}))
    except (RunnerError, ValueError) as error:
        print(json.dumps({"error": str(error)}))
