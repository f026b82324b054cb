"""Compares the working tree with an earlier commit: ``python -m benchmarks.against COMMIT``.

Small costs add up unseen: five changes of two percent each are ten percent. So this compares totals, since a commit
that stays the same. Both sides run the same rounds, and the same steps of a model, in alternation, each on a server of
its own that writes nothing to disk. They share the benchmark's code and the environment of the working tree; only the
package redisacc differs. A ratio is the working tree's time divided by the commit's, so below 1 the working tree is
faster.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import redis

from benchmarks import environment, models, workloads
from benchmarks.crew import BenchmarkError, Crew
from benchmarks.environment import Run
from benchmarks.sections import rounds, steps
from benchmarks.sections.rounds import Peer
from benchmarks.workloads import Workload

ROOT = Path(__file__).resolve().parents[1]


def main(arguments: list[str] | None = None) -> int:
    """Compares, and prints a table.

    Args:
        arguments: the command line; None: the process's.

    Returns:
        The exit code, which is 1 if a process failed or gave a wrong result, and 2 if there is no such commit.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.against", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("commit", help="the earlier commit, as git understands it")
    parser.add_argument("--quick", action="store_true", help="run few rounds, without the largest row")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only", action="append", help="measure only this row, or only `steps`; may be repeated")
    parser.add_argument("--rounds", type=int, help="number of rounds of each row (default: 60, with --quick 15)")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="redisacc-against-") as directory:
        try:
            folders = {given.commit: check_out(given.commit, Path(directory, "commit")), "now": ROOT}
        except subprocess.CalledProcessError as error:
            print(f"error: git knows no commit {given.commit}: {error.stderr.decode().strip()}", file=sys.stderr)
            return 2
        run = Run(
            quick=given.quick or given.tiny,
            tiny=given.tiny,
            tensorflow=None,
            torch=None,
            server=environment.default_server(),
            directory=Path(directory),
        )
        rows = workloads.TINY if given.tiny else list(workloads.SIX_ROWS)[: -1 if given.quick else None]
        rows = [row for row in rows if not given.only or row.name in given.only]
        number = given.rounds or (4 if given.tiny else 15 if given.quick else 60)
        try:
            lines = compare_rounds(run, folders, rows, number) if rows else []
            if not given.only or "steps" in given.only:
                lines += compare_steps(run, folders, 2 if given.tiny else 4 if given.quick else 20)
        except BenchmarkError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print(table(given.commit, lines))
    return 0


def check_out(commit: str, folder: Path) -> Path:
    """Writes the files of a commit into a folder, and returns the folder.

    Raises:
        subprocess.CalledProcessError: there is no such commit.
    """
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def package_of(folder: Path, *_: object) -> Sequence[str]:
    """Returns the words before a command that let it import redisacc from a checkout, whatever its role in a crew."""
    return ["env", f"PYTHONPATH={folder}"]


def script_totals(client: redis.Redis) -> dict[str, float]:
    """Returns how many scripts a server has run, and for how many microseconds."""
    found = client.info("commandstats").get("cmdstat_evalsha", {})
    return {"scripts": found.get("calls", 0), "script_us": found.get("usec", 0)}


def peers_of(
    run: Run, stack: contextlib.ExitStack, folders: dict[str, Path], program: str, settings: dict[str, Any]
) -> list[Peer]:
    """Starts a crew of each side on a server of its own."""
    peers = []
    for name, folder in folders.items():
        server, client = stack.enter_context(run.start_server(f"against, {name}", persistent=False))
        crew = Crew(
            name,
            sys.executable,
            program,
            workers=run.workers,
            settings={**settings, "url": server.url},
            directory=run.directory,
            host=partial(package_of, folder),
        )
        stack.callback(crew.end)
        peers.append(Peer(name, crew, [server.pid], totals=partial(script_totals, client)))
    return peers


def compare_rounds(run: Run, folders: dict[str, Path], rows: list[Workload], number: int) -> list[dict[str, Any]]:
    """Runs rounds of each side in alternation."""
    with contextlib.ExitStack() as stack:
        settings = run.arrays(rows, [run.workers])
        peers = peers_of(run, stack, folders, "redisacc_peer", settings)
        found = rounds.compete(peers, rows, number, 60.0, 1 if run.tiny else 5)
    return [line(row.name, *found[row.name]["peers"].values()) for row in rows]


def compare_steps(run: Run, folders: dict[str, Path], blocks: int) -> list[dict[str, Any]]:
    """Runs steps of a model in alternation, by its parts and with `Chief` and `Worker`, if the commit has them."""
    model = models.tiny() if run.tiny else models.mixed()
    if any(not has_trainings(folder) for folder in folders.values()):
        print("  steps: left out, because the commit has no Chief")
        return []
    models.write(run.directory / "models", [model], run.workers)
    lines = []
    for method, label in (("direct", "step, tree and parameters"), ("loop", "step, Chief and Worker")):
        with contextlib.ExitStack() as stack:
            settings = {
                "workloads": [],
                "arrays": str(run.directory / "models"),
                "model": model.name,
                "method": method,
            }
            peers = peers_of(run, stack, folders, "redisacc_steps", settings)
            print(f"  {label}")
            found = steps.compete(peers, blocks)
        lines.append(line(label, *found["peers"].values()))
    return lines


def has_trainings(folder: Path) -> bool:
    """Returns whether the redisacc of a checkout has `Chief`."""
    code = "import sys, redisacc; sys.exit(not hasattr(redisacc, 'Chief'))"
    return not subprocess.run([*package_of(folder), sys.executable, "-P", "-c", code], check=False).returncode


def line(name: str, then: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Returns a line of the table: medians in seconds, and microseconds of a script, on both sides."""
    found: dict[str, Any] = {"name": name}
    for side, peer in (("then", then), ("now", now)):
        totals = peer.get("totals_a_round") or peer["server_a_step"]
        found[side] = peer["seconds"]["median"]
        found[f"{side}_script_us"] = totals["script_us"] / totals["scripts"] if totals["scripts"] else float("nan")
        found[f"{side}_scripts"] = totals["scripts"]
    return found


def table(commit: str, lines: list[dict[str, Any]]) -> str:
    """Returns the table as Markdown."""
    text = [
        f"| | ms at {commit} | ms now | ratio | scripts, then and now | µs each, then and now | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    text += [
        f"| {one['name']} | {one['then'] * 1e3:.2f} | {one['now'] * 1e3:.2f} | {one['now'] / one['then']:.2f} "
        f"| {one['then_scripts']:.1f}, {one['now_scripts']:.1f} "
        f"| {one['then_script_us']:.1f}, {one['now_script_us']:.1f} "
        f"| {one['now_script_us'] / one['then_script_us']:.2f} |"
        for one in lines
    ]
    return "\n".join(text)


if __name__ == "__main__":
    sys.exit(main())
