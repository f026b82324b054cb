"""Breaks everything at once, at random from a seed, and sees that nothing is lost and nothing counted twice.

Workers and takers reach a server through a proxy that cuts connections and delays requests. All of them, and the
server, are killed and stopped at random instants. Every gradient is unique, so the rounds reveal any loss and any
repetition.

python -m chaos.run --seconds 180 --seed 1
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from chaos.actor import ROW, contents, opened
from support.leaks import leftovers
from support.proxy import Proxy, Weather, proxy_before

import redisacc
from redisacc import embedded

ACTOR = Path(__file__).with_name("actor.py")
# The first index of a process: those that it uses are counted up from there.
STRIDE = 1_000_000
WEATHER = Weather(cut=0.004, late=0.003, delay=0.02, bytewise=0.004)
# A pause that outlasts every lease in the queue of takers, in seconds.
LONG_PAUSE = 4.0


class Server:
    """A server that loses nothing when it is killed, because it replies only after writing its append-only file."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.socket = str(directory / "s")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.socket)
        command = [str(embedded.find_server()), "--port", "0", "--unixsocket", self.socket, "--save", ""]
        command += ["--dir", str(self._directory), "--appendonly", "yes", "--appendfsync", "always"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.RedisError:
                assert time.monotonic() < deadline, "the server doesn't start"
                time.sleep(0.02)

    def client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=self.socket)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@dataclass
class Tale:
    """The contents of the journals."""

    begun: set[int] = field(default_factory=set)
    # index -> step of the round that the reply named
    applied: dict[int, int] = field(default_factory=dict)
    # Stale, or refused: in no round.
    dropped: set[int] = field(default_factory=set)
    rounds: dict[int, dict[str, Any]] = field(default_factory=dict)
    handed_out_again: int = 0
    problems: list[str] = field(default_factory=list)

    def read(self, journal: Path) -> None:
        for line in journal.read_text().splitlines():
            entry = json.loads(line)
            if "begin" in entry:
                self.begun.add(entry["begin"])
            elif "end" in entry and entry["outcome"] == "applied":
                self.applied[entry["end"]] = entry["step"]
            elif "end" in entry:
                self.dropped.add(entry["end"])
            else:
                self.add_round(entry.pop("round"), entry)

    def add_round(self, step: int, round_: dict[str, Any]) -> None:
        if step in self.rounds:
            # Its taker died before it was acknowledged.
            self.handed_out_again += 1
            if self.rounds[step] != round_:
                self.problems.append(f"round {step} was another when it was handed out again")
        self.rounds[step] = round_

    def check(self, info: redisacc.AccumulatorInfo) -> None:
        """Compares the replies to workers with the rounds of takers."""
        seen: Counter[int] = Counter()
        where: dict[int, int] = {}
        for step, round_ in self.rounds.items():
            held = dict(zip(round_["indices"], round_["values"], strict=True))
            common = held.pop(0, None)
            number = len(held)
            if not (number == round_["count"] == round_["workers"] and common == [float(number)] * ROW):
                self.problems.append(
                    f"round {step} of {round_['count']} holds {number} gradients, and sums to {common}"
                )
            for index, row in held.items():
                seen[index] += 1
                where[index] = step
                if row != [index + 0.5] * ROW:
                    self.problems.append(f"gradient {index} is in a round as {row}")
        self.problems += [f"gradient {index} is in rounds {n} times" for index, n in seen.items() if n > 1]
        self.problems += [f"gradient {index} is in a round, but was never sent" for index in seen.keys() - self.begun]
        self.problems += [f"gradient {index} is in a round, but was dropped" for index in seen.keys() & self.dropped]
        for index, step in self.applied.items():
            if index not in where:
                self.problems.append(f"gradient {index}, which was counted at step {step}, is lost")
            elif where[index] != step:
                self.problems.append(f"gradient {index} is in round {where[index]}, not {step}")
        if sorted(self.rounds) != list(range(info.global_step)):
            missing = sorted(set(range(info.global_step)) - self.rounds.keys())
            self.problems.append(f"of {info.global_step} rounds, these were never delivered: {missing[:10]}")
        if (info.applied, info.takes) != (len(seen), len(self.rounds)):
            self.problems.append(
                f"the server counts {info.applied} gradients and {info.takes} rounds, but "
                f"{len(seen)} and {len(self.rounds)} were delivered"
            )


class Chaos:
    """A run. After entry, everything works; ``rage`` breaks things; ``end`` checks the result."""

    def __init__(self, *, seed: int, workers: int, takers: int, weather: Weather | None = WEATHER) -> None:
        self._random = random.Random(seed)
        self._seed = seed
        self._weather = weather
        self._roles = {f"worker{k}": "worker" for k in range(workers)} | {f"taker{k}": "taker" for k in range(takers)}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._stopped: dict[str, float] = {}
        self._stack = contextlib.ExitStack()
        self.done: Counter[str] = Counter()

    def __enter__(self) -> Chaos:
        self._directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        self._server = Server(self._directory)
        self._stack.callback(self._server.kill)
        self._server.start()
        self._stack.callback(self._kill_all)
        self._proxy: Proxy = self._stack.enter_context(proxy_before(self._server.socket, self._seed))
        self._accumulator = opened(self._stack.enter_context(self._server.client()), "observer")
        self._stop = self._directory / "stop"
        for name in self._roles:
            self._start(name)
        self._proxy.weather(self._weather)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, name: str) -> None:
        self.done["processes"] += 1
        number = self.done["processes"]
        command = [sys.executable, str(ACTOR), self._roles[name], self._proxy.url, name, str(number * STRIDE)]
        command += [str(self._directory / f"{name}-{number}.journal"), str(self._stop), str(self._seed + number)]
        errors = (self._directory / f"{name}-{number}.errors").open("wb")
        with errors:
            self._running[name] = subprocess.Popen(command, stderr=errors)

    def _kill_all(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    # Breaking things

    def rage(self, seconds: float) -> None:
        """Breaks something every now and then."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(self._random.uniform(0.1, 0.6))
            self._wake_up(time.monotonic())
            deeds = [self._kill, self._kill, self._pause, self._pause, self._flush, self._cut_all, self._kill_server]
            self._random.choice([*deeds, self._pause_server])()
            for name, process in self._running.items():
                assert process.poll() is None, f"{name} ended by itself: {self._errors()}"

    def _someone(self) -> str:
        return self._random.choice(sorted(self._running))

    def _kill(self) -> None:
        name = self._someone()
        self._running[name].kill()
        self._running[name].wait()
        self._stopped.pop(name, None)
        self.done["kills"] += 1
        self._start(name)

    def _pause(self) -> None:
        name = self._someone()
        if name not in self._stopped:
            self._running[name].send_signal(signal.SIGSTOP)
            self._stopped[name] = time.monotonic() + self._random.choice([0.1, 1.0, LONG_PAUSE])
            self.done["pauses"] += 1

    def _wake_up(self, now: float) -> None:
        for name, until in list(self._stopped.items()):
            if until <= now:
                del self._stopped[name]
                self._running[name].send_signal(signal.SIGCONT)

    def _flush(self) -> None:
        with self._server.client() as client:
            client.script_flush()
        self.done["script flushes"] += 1

    def _cut_all(self) -> None:
        self._proxy.cut_all()
        self.done["all connections cut"] += 1

    def _kill_server(self) -> None:
        self._server.kill()
        time.sleep(self._random.uniform(0.0, 0.5))
        self._server.start()
        self.done["server kills"] += 1

    def _pause_server(self) -> None:
        self._server.signal(signal.SIGSTOP)
        time.sleep(self._random.uniform(0.1, 2.0))
        self._server.signal(signal.SIGCONT)
        self.done["server pauses"] += 1

    # Checking the result

    def _errors(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self._directory.glob("*.errors"))

    def end(self) -> Tale:
        """Lets every process finish, takes the remaining rounds, and compares."""
        self._proxy.weather(None)
        self._wake_up(float("inf"))
        self._stop.touch()
        for name, process in self._running.items():
            assert process.wait(120) == 0, f"{name} failed: {self._errors()}"
        self._proxy.deliver_late()
        tale = Tale()
        for journal in self._directory.glob("*.journal"):
            tale.read(journal)
        accumulator = self._accumulator
        while accumulator.info().unacknowledged:
            with accumulator.recover() as taken:
                assert taken is not None
                tale.add_round(taken.global_step, contents(taken))
        if accumulator.num_accumulated():
            with accumulator.take(1, timeout=30) as taken:
                tale.add_round(taken.global_step, contents(taken))
        # A taker that was killed, or whose request arrived late, is in the queue until its lease runs out.
        deadline = time.monotonic() + 30
        while accumulator.info().waiting and time.monotonic() < deadline:
            time.sleep(0.1)
        info = accumulator.info()
        tale.check(info)
        if info.waiting or info.unacknowledged:
            tale.problems.append(f"left behind: {info.waiting} {info.unacknowledged}")
        with self._server.client() as client:
            self.done["duplicates recognised"] = info.duplicates
            tale.problems += leftovers(client)
            accumulator.delete()
            tale.problems += [f"after the end: {key!r}" for key in client.scan_iter() if client.pttl(key) < 0]
        self.done["gradients"], self.done["rounds"] = info.applied, info.takes
        self.done["stale or refused"], self.done["rounds handed out again"] = len(tale.dropped), tale.handed_out_again
        self.done.update({f"proxy: {what}": number for what, number in self._proxy.fired.items()})
        if tale.problems and os.environ.get("CHAOS_KEEP"):
            shutil.copytree(self._directory, os.environ["CHAOS_KEEP"], ignore=lambda *_: {"s"}, dirs_exist_ok=True)
        return tale


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--takers", type=int, default=3)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with Chaos(seed=options.seed, workers=options.workers, takers=options.takers) as chaos:
        chaos.rage(options.seconds)
        tale = chaos.end()
    for what, number in sorted(chaos.done.items()):
        print(f"{number:8} {what}")
    print("\n".join(tale.problems[:50]))
    print(f"{len(tale.problems)} problems: " + ("FAILED" if tale.problems else "nothing lost, nothing twice"))
    sys.exit(1 if tale.problems else 0)


if __name__ == "__main__":
    main()
