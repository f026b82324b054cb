"""Measures the machine's own noise, which the times of scripts contain."""

from __future__ import annotations

import sys

from benchmarks.crew import Crew
from benchmarks.environment import Run
from benchmarks.slow_log import COUNTING


def control(run: Run) -> None:
    """Measures the machine's own noise: as many processes as in a round call a script that counts to 12,000."""
    with (
        run.start_server("control", persistent=False) as (server, _),
        Crew(
            "control",
            sys.executable,
            "nothing",
            workers=run.workers + 1,
            settings={"url": server.url, "script": COUNTING, "arrays": "", "workloads": []},
            directory=run.directory,
            taker=False,
        ) as crew,
    ):
        crew.round("nothing", repeat=200 if run.tiny else 1000 if run.quick else 5000)
