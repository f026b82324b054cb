"""Breaks the package by one rule at a time, and checks that its tests notice: `make mutants`.

Works on copies of the package, so the checkout stays as it is. At first, all tests of the table run without a mutation,
and must pass. A mutant with which the package hangs counts as killed.
"""

import argparse
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rules import RULES

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("redisacc", "lua", "tests", "pyproject.toml")
# Seconds. A wait that a mutation makes endless is ended by pytest after the first, if pytest can still end it.
TEST_TIMEOUT, TIMEOUT = 20, 120
# What pytest exits with if tests failed, or could not be imported.
FAILED = (1, 2)
_FIRST = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


class Outcome(NamedTuple):
    """How a run of pytest ended.

    Attributes:
        killed_by: the test that failed first, or "timeout"; empty if all tests passed.
        seconds: how long it took.
        output: what pytest printed.
    """

    killed_by: str
    seconds: float
    output: str


class Copy:
    """A copy of the package and its tests, in which one rule after the other is broken."""

    def __init__(self, folder):
        self._folder = folder
        for name in COPIED:
            source, copy = ROOT / name, folder / name
            if source.is_dir():
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, copy)
        # Tests start processes, which have to import the mutant as well: an editable installation comes after this.
        self._environment = {**os.environ, "PYTHONPATH": str(folder)}
        code = "import redisacc; print(redisacc.__file__)"
        imported = subprocess.run(
            [sys.executable, "-c", code], env=self._environment, cwd="/", capture_output=True, text=True, check=True
        )
        if not Path(imported.stdout).is_relative_to(folder):
            sys.exit(f"the mutants would not be imported, but {imported.stdout.strip()}")

    def mutated(self, rule):
        """Runs the tests of a rule while it is broken."""
        path = self._folder / rule.file
        text = path.read_text()
        if text.count(rule.old) != 1:
            sys.exit(f"{rule.file} does not have this once: {rule.old!r}")
        path.write_text(text.replace(rule.old, rule.new))
        try:
            return self.run(rule.tests)
        finally:
            # With the time of its last change, by which Python knows that what it compiled of the mutant is stale.
            shutil.copy2(ROOT / rule.file, path)

    def run(self, tests):
        """Runs some tests, given as arguments of pytest."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", "-p", "no:cacheprovider"]
        command += [f"--timeout={TEST_TIMEOUT}", *shlex.split(tests)]
        began = time.monotonic()
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(TIMEOUT)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                # Servers of the tests end by themselves when their owner is gone.
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            text = output.read()
        seconds = time.monotonic() - began
        if status is None or status < 0:
            return Outcome("timeout" if status is None else f"signal {-status}", seconds, text)
        if status not in (0, *FAILED):
            sys.exit(f"pytest ended with {status}: {tests}\n{text}")
        found = _FIRST.search(text)
        return Outcome("" if status == 0 else found[1] if found else "an error of pytest", seconds, text)


def main():
    """Prints a table of all mutants, and returns 1 if one survives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="WORD", help="rules in whose sentence or file this word occurs")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutants at the same time")
    options = parser.parse_args()
    chosen = [
        (number, rule) for number, rule in enumerate(RULES, start=1) if options.only in f"{rule.promise} {rule.file}"
    ]
    with tempfile.TemporaryDirectory(prefix="mutants-") as place, ThreadPoolExecutor(options.jobs) as pool:
        copies = queue.SimpleQueue()
        for number in range(options.jobs):
            copies.put(Copy(Path(place).resolve() / str(number)))

        def checked(tests):
            copy = copies.get()
            outcome = copy.run(tests)
            copies.put(copy)
            return outcome.killed_by and f"without a mutation, this fails: {tests}\n{outcome.output}"

        def mutated(rule):
            copy = copies.get()
            outcome = copy.mutated(rule)
            copies.put(copy)
            return outcome

        for failure in pool.map(checked, dict.fromkeys(rule.tests for _, rule in chosen)):
            if failure:
                pool.shutdown(cancel_futures=True)
                sys.exit(failure)
        survivors = 0
        print("| | rule | place | killed by | s |\n| --- | --- | --- | --- | --- |")
        for (number, rule), outcome in zip(chosen, pool.map(mutated, [rule for _, rule in chosen]), strict=True):
            survivors += not outcome.killed_by
            killed_by = outcome.killed_by.replace("|", "\\|") or "**SURVIVED**"
            print(f"| {number} | {rule.promise} | {rule.file} | {killed_by} | {outcome.seconds:.0f} |", flush=True)
    print(f"\n{len(chosen) - survivors} of {len(chosen)} mutants are killed", file=sys.stderr)
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
