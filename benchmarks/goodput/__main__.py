"""Measures how much of a training is left when processes are killed: ``python -m benchmarks.goodput``.

A training with an optimizer runs for some time, undisturbed and then with ``kill -9`` for a random process at a regular
interval. Goodput is the number of steps in a second, as a share of the undisturbed runs' before and after. Each worker
notes a digest of the parameters of each step, and all runs of a crew must have the same ones: a step that was lost,
repeated or computed from other gradients would show in all that follow.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.goodput.measure import NEEDED, Crew, Outcome, median, run
from benchmarks.goodput.report import NAMES, render
from benchmarks.markdown import write

ROOT = Path(__file__).resolve().parents[2]
# The crews, and which processes of each are killed, one kind in each run.
VICTIMS = {Crew(): ("worker", "chief"), Crew(training=True): ("any",), Crew(cluster=True): ("reducer", "node")}


def main(arguments: list[str] | None = None) -> int:
    """Measures, and writes a page and its figures. Returns 1 if runs differ in a bit."""
    given = _parser().parse_args(arguments)
    # A part of the rows must not replace the page that has all of them.
    whole = not (given.only or given.every or given.backup)
    out = given.out or (ROOT / "benchmarks" / "results" if whole else ROOT / "build" / "benchmarks")
    if given.render:
        write(json.loads((out / NAMES[0]).read_text()), out, NAMES, render, None)
        return 0
    began = time.monotonic()
    results: dict[str, Any] = {**environment.described(quick=False), "needed": NEEDED, "crews": []}
    results["options"] = " ".join(sys.argv[1:] if arguments is None else arguments)
    if given.add:
        results["crews"] += json.loads((out / NAMES[0]).read_text())["crews"]
    different = 0
    for kind, every in VICTIMS.items():
        victims = [name for name in every if name in (given.only or every)]
        for backup in given.backup or (0, 1):
            if victims:
                different += _crew(given, results, victims, replace(kind, backup=backup))
                results["seconds"] = round(time.monotonic() - began)
                # After each crew, so that a run that is interrupted keeps the others.
                write(results, out, NAMES, render, None)
    print(f"{results['seconds']} s; wrote {', '.join(str(out / name) for name in NAMES)}")
    return 1 if different else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.goodput", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--seconds", type=float, default=600, help="how long each run takes, or an interval if that is more"
    )
    parser.add_argument("--every", type=float, action="append", help="seconds between kills (default: 10, 30 and 120)")
    parser.add_argument(
        "--only", action="append", choices=[*chain(*VICTIMS.values())], help="kill only these; may be repeated"
    )
    parser.add_argument("--backup", type=int, action="append", choices=(0, 1), help="backup workers (default: 0 and 1)")
    parser.add_argument("--seed", type=int, default=1, help="decides which processes are killed")
    parser.add_argument("--out", type=Path, help="folder to write into (default: benchmarks/results)")
    parser.add_argument("--add", action="store_true", help="keep the figures in --out, and add others")
    parser.add_argument("--render", action="store_true", help="write the page from the figures in --out")
    return parser


def _crew(given: argparse.Namespace, results: dict[str, Any], victims: list[str], crew: Crew) -> int:
    """Measures a crew, and adds it to the results. Returns how many steps differ between its runs or workers."""
    digests: dict[int, set[int]] = {}

    def measured(victim: str, every: float | None) -> Outcome:
        seconds = max(given.seconds, every or 0)
        found = run(seconds, victim, every, crew, seed=given.seed)
        for step, values in found.digests.items():
            digests.setdefault(step, set()).update(values)
        print(
            f"{victim} every {every} s: {found.steps} steps in {found.seconds:.1f} s, {found.kills} kills", flush=True
        )
        return found

    undisturbed = [measured("nobody", None)]
    disturbed = [
        (victim, every, measured(victim, every)) for victim in victims for every in given.every or (10, 30, 120)
    ]
    undisturbed.append(measured("nobody", None))
    rate = sum(one.steps / one.seconds for one in undisturbed) / len(undisturbed)
    rows = [
        {
            "victim": victim,
            "every": every,
            "kills": one.kills,
            "steps": one.steps,
            "seconds": one.seconds,
            "goodput": one.steps / one.seconds / rate,
            "lost": (one.seconds - one.steps / rate) / max(one.kills, 1),
            "back": median(one.back),
        }
        for victim, every, one in disturbed
    ]
    different = [step for step, values in digests.items() if len(values) > 1]
    rates = [one.steps / one.seconds for one in undisturbed]
    measured_crew = {**asdict(crew), "undisturbed": rates, "rows": rows}
    results["crews"].append({**measured_crew, "steps": len(digests), "different": len(different)})
    return len(different)


if __name__ == "__main__":
    sys.exit(main())
