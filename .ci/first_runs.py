"""Runs `make test` in fresh clones of the last commit, as somebody does who tries it for the first time.

    python3 .ci/first_runs.py [RUNS] [TARGET] [half|all|none]

Half of the runs (every other one), all or none share the processors with as many processes that do nothing but burn
them. A run is green if make ends with 0 and nothing stands after the last line of pytest. Prints a line for each run,
and keeps the output of those that are not green in build/first_runs/.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "build" / "first_runs"
_LAST = re.compile(r"=+ (.*) in ([\d.]+)s.* =+")


@contextlib.contextmanager
def burning(processes: int) -> Iterator[None]:
    """Keeps processors busy."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def run(number: int, target: str, burners: int) -> bool:
    """Makes a target in a fresh clone, prints a line about it, and returns whether it was green."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "CI"))}
    with tempfile.TemporaryDirectory(prefix="first-run-") as folder, burning(burners):
        clone = Path(folder) / "redisacc"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        began = time.monotonic()
        done = subprocess.run(
            ["make", target],
            cwd=clone,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - began
    lines = done.stdout.rstrip().splitlines()
    last = [match for line in lines if (match := _LAST.fullmatch(line.strip()))]
    is_quiet = bool(lines) and _LAST.fullmatch(lines[-1].strip()) is not None
    is_green = done.returncode == 0 and is_quiet
    result = last[-1][1] if last else f"make ended with {done.returncode}"
    if done.returncode == 0 and not is_quiet:
        result += f"; and afterwards: {lines[-1] if lines else ''}"
    print(f"| {number} | {burners} | {seconds:.0f} | {last[-1][2] if last else ''} | {result} |", flush=True)
    if not is_green:
        KEPT.mkdir(parents=True, exist_ok=True)
        (KEPT / f"{number}.log").write_text(done.stdout, "utf-8")
    return is_green


def main() -> int:
    """Makes all runs, and returns 1 if one of them was not green."""
    runs, target = int(sys.argv[1]) if len(sys.argv) > 1 else 20, sys.argv[2] if len(sys.argv) > 2 else "test"
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    busy = sys.argv[3] if len(sys.argv) > 3 else "half"
    processors = os.cpu_count() or 1
    print(f"make {target} in fresh clones of {commit}, {processors} processors\n")
    print("| run | burners | seconds, with set-up | seconds of pytest | result |\n| --- | --- | --- | --- | --- |")
    green = 0
    for number in range(1, runs + 1):
        is_busy = busy == "all" or (busy == "half" and number % 2 == 0)
        green += run(number, target, processors if is_busy else 0)
    print(f"\n{green} of {runs} are green")
    return green < runs


if __name__ == "__main__":
    sys.exit(main())
