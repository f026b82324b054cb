"""Compares two trainings under DDP, Horovod's documented form and redisacc: ``python -m benchmarks.comparison``.

Counts the lines that change, measures an epoch, and kills a process. Horovod is not run: only its lines are counted.
The hosts are network namespaces, which need Linux and root. Without them, only one host is measured.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.comparison.crew import GPT, OURS
from benchmarks.comparison.measure import ALONE, WORKERS, after_a_kill, largest_difference, mode, new_lines, undisturbed
from benchmarks.comparison.report import NAMES, OPTIMIZERS, TITLES, TITLES_OF_GPT, render
from benchmarks.markdown import write
from benchmarks.network.hosts import Hosts, obstacles, remove_leftovers

ROOT = Path(__file__).resolve().parents[2]
MEASURED = (OURS, "ddp")
EVERY = (*TITLES, *TITLES_OF_GPT)
# Prefixes of the programs' names, by model.
MODELS = {"digits": "", "gpt": GPT}


def main(arguments: list[str] | None = None) -> int:
    """Measures, and writes a page and its figures. Returns 1 if a kill changes the result of redisacc."""
    given = _parser().parse_args(arguments)
    if given.hosts and (reasons := obstacles()):
        print("Between hosts, nothing is measured.", *reasons, file=sys.stderr)
        given.hosts = 0
    # A part of the columns must not replace the page that has all of them.
    out = given.out or ROOT / (
        "benchmarks/results" if given.hosts and len(given.models) == len(MODELS) else "build/benchmarks"
    )
    if given.render:
        write(json.loads((out / NAMES[0]).read_text()), out, NAMES, render, None)
        return 0
    began = time.monotonic()
    results: dict[str, Any] = {
        **environment.described(quick=False),
        "options": " ".join(sys.argv[1:] if arguments is None else arguments),
        **{key: getattr(given, key) for key in ("epochs", "repeats", "hosts", "rate", "models")},
        "programs": {name: _program(name) for name in EVERY},
    }
    results["versions"] |= {name: importlib.metadata.version(name) for name in ("torch", "scikit-learn")}
    _measure(results)
    results["seconds"] = round(time.monotonic() - began)
    write(results, out, NAMES, render, None)
    print(f"{results['seconds']} s; wrote {', '.join(str(out / name) for name in NAMES)}")
    every = [results["programs"][MODELS[each] + OURS] for each in given.models]
    return 0 if all(ours["kill"]["weights"] == [ours["weights"]] for ours in every) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.comparison", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--hosts", type=int, default=4, help="hosts with a process each; 0: only this one (default: 4)")
    parser.add_argument("--rate", type=float, default=1.0, help="rate of the hosts' links in Gbit/s (default: 1)")
    parser.add_argument("--epochs", type=int, default=8, help="epochs of each run (default: 8)")
    parser.add_argument("--repeats", type=int, default=2, help="how often each program runs (default: 2)")
    parser.add_argument("--models", choices=MODELS, nargs="+", default=[*MODELS], help="which models (default: both)")
    parser.add_argument("--out", type=Path, help="folder to write into (default: benchmarks/results)")
    parser.add_argument("--render", action="store_true", help="write the page from the figures in --out")
    return parser


def _program(name: str) -> dict[str, Any]:
    nothing = {"one_host": [], "between_hosts": [], "accuracy": None, "weights": None, "kill": None}
    return {"lines": new_lines(name), **nothing}


def _measure(results: dict[str, Any]) -> None:
    programs, epochs = results["programs"], results["epochs"]

    def add(name: str, place: str, workers: int, hosts: Hosts | None = None) -> dict[str, Any]:
        found = undisturbed(name, workers, epochs, hosts)
        programs[name][place].append(found["seconds"])
        print(f"{name}, {place}: {', '.join(f'{each:.2f}' for each in found['seconds'])} s", flush=True)
        return found

    models = [MODELS[each] for each in results["models"]]
    measured = [before + name for before in models for name in MEASURED]
    for _ in range(results["repeats"]):
        for name in (*[before + ALONE for before in models], *measured):
            found = add(name, "one_host", 1 if name.endswith(ALONE) else WORKERS)
            programs[name] |= {key: found[key] for key in ("accuracy", "weights")}
    if GPT in models:
        results["differences"] = {each: largest_difference(each, min(epochs, 3)) for each in OPTIMIZERS}
        print(f"largest differences of weights: {results['differences']}", flush=True)
        ways = [(each, fused) for each in ("SGD", "AdamW") for fused in (True, False)]
        results["modes"] = [mode(each, epochs, fused=fused) for each, fused in ways]
        print(*results["modes"], sep="\n", flush=True)
    for name in measured:
        programs[name]["kill"] = after_a_kill(name, epochs)
        print(f"{name}, a kill: {programs[name]['kill']}", flush=True)
    if results["hosts"]:
        remove_leftovers()
        with Hosts([f"host{number}" for number in range(results["hosts"])], results["rate"]) as hosts:
            for _ in range(results["repeats"]):
                for name in measured:
                    add(name, "between_hosts", results["hosts"], hosts)


if __name__ == "__main__":
    sys.exit(main())
