"""Draws who waits for whom in a step, and for how long: ``python -m benchmarks.trace``.

Three steps are recorded: a training of 1.2 MB with two workers on one server, one of 4 MB on four hosts, and a round of
100 rows of 64 of four workers. The hosts are network namespaces, which need Linux and root; without them, that one is
left out.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.network.hosts import Hosts, obstacles, remove_leftovers
from benchmarks.trace.picture import Step, draw, table
from redisacc.embedded import Server

ROOT = Path(__file__).resolve().parents[2]
PORT = 29501
LIMIT = 120.0
# Rounds begin when all processes have opened their handles, in nanoseconds.
START = 8 * 10**9
PROGRAM = (sys.executable, "-m", "benchmarks.trace.program")
RUN = (sys.executable, "-m", "redisacc", "run")


@dataclass(frozen=True)
class Case:
    """What is recorded: a training, or rounds if it has no bytes.

    Attributes:
        name: name of the files.
        title: title in the page.
        workers: how many processes work.
        nbytes: bytes of the model.
        hosts: on how many hosts; 0: on this one, with one server.
        encoding: how elements travel.
        said: what the long blocks are.
    """

    name: str
    title: str
    workers: int
    nbytes: int = 0
    hosts: int = 0
    encoding: str | None = None
    said: str = ""


BETWEEN_HOSTS = (
    "All processes of the four hosts share the processors, so an exchange that computes for 0.1 ms takes milliseconds: "
    "its thread, or the node, waits for a processor. The leader's exchanges after the last `commit` follow one "
    "another: `take`, `register_version`, what each node confirms, `publish`. It removes the parts of the step before "
    "while the gradients of the next one arrive."
)
CASES = (
    Case(
        "training",
        "A training of 1.2 MB in two arrays, two workers, one server",
        2,
        1_200_000,
        said="Between its parameters and its `stage`, a worker makes the tree and checks that the gradient is finite. "
        "`stage` to `commit` is the upload of 1.2 MB. Between `take` and the parts, the leader reads what is in the "
        "round; after the parts, it adds them and makes the update. It sends the next version, publishes it and reads "
        "its record in one exchange, and hands the parts to its own worker. The other worker waits for it.",
    ),
    Case("hosts", "A training of 4 MB, four hosts at 1 Gbit/s, a worker on each", 4, 4_000_000, 4, said=BETWEEN_HOSTS),
    Case(
        "hosts-bfloat16",
        "The same with bfloat16",
        4,
        4_000_000,
        4,
        "bfloat16",
        said="Half the bytes, and after `HMGET` each worker computes longer: it widens the parameters to float32, "
        "checks the gradient, and rounds it. All workers do that at the same time, on the same processors.",
    ),
    Case(
        "rounds",
        "A round of 100 rows of 64, four workers and a taker, one server",
        4,
        said="The first commits come at the same time and queue at the server. The last one wakes the thread of the "
        "taker that listens, and that thread the taker. After `take`, the taker adds four gradients.",
    ),
)


def main(arguments: list[str] | None = None) -> int:
    """Records, and writes a picture of each step and a page of tables."""
    said = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trace", description=said)
    parser.add_argument("--only", action="append", choices=[case.name for case in CASES], help="may be repeated")
    parser.add_argument("--steps", type=int, default=60, help="how many steps are made (default: 60)")
    parser.add_argument("--out", type=Path, help="folder to write into")
    given = parser.parse_args(arguments)
    # A part of the page must not replace the whole one.
    given.out = given.out or ROOT / ("build/benchmarks" if given.only else "benchmarks/results")
    given.out.mkdir(parents=True, exist_ok=True)
    machine = environment.machine()
    page = [
        "# Time line of a step",
        "",
        f"Written by `make trace` on {time.strftime('%Y-%m-%d')}: {machine['cpu']}, {machine['cores']} "
        f"processors, load {machine['load_before']:.1f} before the run. Each picture shows the step of median length: "
        "a lane for each thread, and one for each server. The server says how long each command took; it is drawn as "
        "late as its reply allows. Between the blocks of a lane, the thread computes, or waits for a processor or "
        "for Python's lock. Reducers have no lane.",
    ]
    for case in CASES:
        if given.only and case.name not in given.only:
            continue
        if case.hosts and (reasons := obstacles()):
            print(f"{case.name} is left out.", *reasons, file=sys.stderr)
            continue
        step = Step.median(_record(case, given.steps))
        (given.out / f"trace-{case.name}.svg").write_text(draw(step, case.title))
        page += [
            "",
            f"## {case.title}",
            "",
            f"![The lanes of a step](trace-{case.name}.svg)",
            "",
            case.said,
            "",
            *table(step),
        ]
        print(f"{case.name}: {step.length / 1e6:.2f} ms; median of all steps {step.median_length / 1e6:.2f} ms")
    (given.out / "trace.md").write_text("\n".join(page) + "\n")
    return 0


def _record(case: Case, rounds: int) -> list[dict[str, Any]]:
    """Returns what each process has recorded, the one that counts steps first."""
    with tempfile.TemporaryDirectory(prefix="redisacc-trace-") as folder:
        job: dict[str, Any] = {"folder": folder, "rounds": rounds, "bytes": case.nbytes, "encoding": case.encoding}
        if case.hosts:
            remove_leftovers()
            with Hosts([f"host{number}" for number in range(case.hosts)], 1.0) as hosts:
                meet = f"{hosts.address('host0')}:{PORT}"
                program = [*PROGRAM, json.dumps({**job, "role": "train", "workers": None})]
                run = [*RUN, "--hosts", str(case.hosts), "--meet", meet, "--workers", "1"]
                _run(
                    [
                        [*hosts.command(name), *run, "--host-name", name, "--", *program]
                        for name in (f"host{number}" for number in range(case.hosts))
                    ],
                    REDISACC_PASSWORD=secrets.token_hex(16),
                )
        elif case.nbytes:
            program = [*PROGRAM, json.dumps({**job, "role": "train", "workers": None})]
            _run([[*RUN, "--server", "--workers", str(case.workers), "--", *program]])
        else:
            with Server() as server:
                job |= {"url": server.url, "workers": case.workers, "start": time.monotonic_ns() + START}
                roles = ["taker"] + ["worker"] * case.workers
                _run([[*PROGRAM, json.dumps({**job, "role": role, "number": n})] for n, role in enumerate(roles)])
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    return sorted(found, key=lambda process: not process["servers"])


def _run(commands: list[list[str]], **more: str) -> None:
    """Runs commands at the same time.

    Raises:
        subprocess.CalledProcessError: one has failed.
    """
    environ = {**os.environ, **more, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for command in commands
    ]
    try:
        for process in started:
            said, _ = process.communicate(timeout=LIMIT)
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, process.args, said.decode(errors="replace"))
    except subprocess.CalledProcessError as error:
        print(error.output, file=sys.stderr)
        raise
    finally:
        for process in started:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
