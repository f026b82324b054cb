"""Breaks everything at once, at random from a seed, and sees that nothing is lost and nothing counted twice.

Actors apply and take, and reducers add up; half of them reach the server through a proxy that cuts connections and
delays requests. All of them, and the server, are killed and stopped at random instants. Every gradient is unique, so
the rounds reveal any loss and any repetition. On a cluster, slots move and nodes come and go, or replicas take over.

python -m chaos.run --seconds 180 --seed 1
python -m chaos.run --cluster --replicas 1
python -m chaos.run --cluster --replicas 1 --partitions 3
python -m chaos.run --gradients 10000000

A long run consists of pieces with a server, an accumulator and a seed of their own, each checked when it ends.

A run that fails leaves a record in build/chaos: what failed, what was done and when, the journals of the actors, and
the logs of the servers.
"""

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
import traceback
from collections import Counter
from functools import partial
from pathlib import Path

from chaos.actor import KINDS, NAME, STRIDE, indices_of, opened
from chaos.cluster import ClusterVictim
from chaos.journal import Tale
from chaos.server import Server
from support.command import collect_garbage
from support.leaks import leftovers
from support.proxy import Weather
from support.until import until

import redisacc

ACTOR = Path(__file__).with_name("actor.py")
RECORD = f"redisacc:{{{NAME}}}"
WEATHER = Weather(cut=0.004, late=0.003, delay=0.02, bytewise=0.004)
# A pause that outlasts every lease in the queue of takers, in seconds.
LONG_PAUSE = 4.0
# How many actors of each role there are, and how many of them reach the server through the proxy.
# While a reducer is stopped, another one takes over; then both believe to work.
CREW = {
    "worker": (4, 2),
    "threads": (1, 0),
    "forks": (1, 1),
    "taker": (2, 1),
    "grad_taker": (2, 1),
    "reducer": (2, 1),
}
SMALL_CREW = {
    "worker": (1, 1),
    "threads": (1, 0),
    "forks": (1, 0),
    "taker": (1, 1),
    "grad_taker": (1, 1),
    "reducer": (2, 1),
}
# A killed process leaves what it has written to the kernel. So no disk is needed, whose fsync would take most of the
# time. None: the directory for temporary files.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
# Where the records of runs that failed are kept.
RECORDS = Path(__file__).parents[2] / "build" / "chaos"
# How many of the latest deeds are shown with a failure.
LATEST = 12
# Gradients of a piece of a long run. What is checked at the end of a piece has to fit into memory.
PIECE = 200_000


class Chaos:
    """A run. After entry, everything works; ``rage`` breaks things; ``end`` checks the result.

    Args:
        seed: of all random choices.
        kind: what the accumulator is: one of KINDS. None: the next one for the next seed.
        crew: how many actors of each role there are, and how many of them use the proxy.
        weather: what the proxy does.
        replicas: on a cluster, of each of its three masters: 0 or 1; None: on a single server.
        partitions: on a cluster, of the accumulator; None: it is on one master.

    Attributes:
        done: what was done, and how often.
    """

    def __init__(
        self,
        *,
        seed,
        kind=None,
        crew=CREW,
        weather=WEATHER,
        replicas=None,
        partitions=None,
    ):
        self._kind = kind or KINDS[seed % len(KINDS)]
        self._random = random.Random(seed)
        self._seed = seed
        # In half of the runs, gradients are large, so that reducers add most of them.
        self._are_large = partitions is not None or seed // len(KINDS) % 2 == 1
        self._weather = weather
        self._replicas = replicas
        self._partitions = partitions
        # name of an actor -> its role, and whether it uses the proxy
        self._roles = {
            f"{role}{number}": (role, number < by_proxy)
            for role, (size, by_proxy) in crew.items()
            for number in range(size)
        }
        self._running = {}
        self._journals = {}
        self._stopped = {}
        self._stack = contextlib.ExitStack()
        self._begun = time.monotonic()
        # What was done, and when.
        self._deeds = []
        self.done = Counter()

    def __enter__(self):
        self._directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-", dir=MEMORY)))
        try:
            self._victim = self._made_victim()
            self._stack.callback(self._victim.stop)
            self._victim.start()
            self._log = self._directory / "log"
            with self._log.open("wb") as log:
                self._fork_server = subprocess.Popen(
                    [sys.executable, "-W", "ignore::DeprecationWarning", str(ACTOR), str(self._directory)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
            self._stack.callback(self._kill_all)
            self._accumulator = opened(
                self._victim.url, "observer", self._kind, are_large=self._are_large, partitions=self._partitions
            )
            self._stack.callback(self._accumulator.close)
            if isinstance(self._victim, ClusterVictim):
                partitions = self._accumulator.info().partitions
                self._victim.keys += [f"redisacc:{{{NAME}/{number:05}}}" for number in partitions]
            for name in self._roles:
                self._start(name)
            self._victim.weather(self._weather)
        except BaseException as error:
            self._record_failure(error)
            self._stack.close()
            raise
        return self

    def __exit__(self, _type, error, _traceback):
        if error is not None:
            self._record_failure(error)
        self._stack.close()

    # The record of a failure

    def _note(self, deed):
        self._deeds.append(f"{time.monotonic() - self._begun:8.2f} {deed}")

    def _record_failure(self, error):
        """Adds the record to an error that ends the run."""
        if isinstance(error, Exception):
            words = self._last_words()
            failure = "".join(traceback.format_exception(error)) + f"\n{words}"
            error.add_note("\n".join(self._record(failure)))

    def _record(self, failure):
        """Keeps what may explain a failure, and returns lines about it."""
        place = RECORDS / f"seed-{self._seed}-{os.getpid()}-{len(self._deeds)}"
        place.mkdir(parents=True, exist_ok=True)
        (place / "failure").write_text(failure)
        (place / "deeds").write_text("\n".join(self._deeds))
        for path in [*self._directory.glob("*.journal"), self._directory / "log"]:
            if path.exists():
                shutil.copy(path, place)
        for path in self._directory.glob("nodes/*/*.log"):
            shutil.copy(path, place / f"{path.parent.name}.log")
        what = f"kind {self._kind}, replicas {self._replicas}, partitions {self._partitions}"
        return [f"seed {self._seed}, {what}; recorded in {place}", "the latest deeds:", *self._deeds[-LATEST:]]

    def _made_victim(self):
        if self._replicas is None:
            return Server(self._directory, self._seed)
        return ClusterVictim(self._directory, RECORD, replicas=self._replicas, seed=self._seed)

    def _start(self, name):
        self.done["processes"] += 1
        number = self.done["processes"]
        role, by_proxy = self._roles[name]
        self._journals[name] = self._directory / f"{name}-{number}.journal"
        task = {
            "role": role,
            "server": self._victim.proxied() if by_proxy else {"url": self._victim.url},
            "min_replicas": self._victim.min_replicas,
            "name": name,
            "kind": self._kind,
            "first": number * STRIDE,
            "seed": self._seed + number,
            "are_large": self._are_large,
            "journal": self._journals[name].name,
        }
        print(json.dumps(task), file=self._fork_server.stdin, flush=True)
        self._running[name] = int(self._fork_server.stdout.readline())

    def _kill_all(self):
        for name in list(self._running):
            self._kill_group(name)
        self._fork_server.stdin.close()
        self._fork_server.stdout.close()
        self._fork_server.wait(20)

    def _kill_group(self, name):
        group = self._running.pop(name)
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.killpg(group, signal.SIGKILL)
                time.sleep(0.001)

    def _is_running(self, name):
        try:
            os.killpg(self._running[name], 0)
        except ProcessLookupError:
            return False
        return True

    # Breaking things

    def rage(self, seconds=float("inf"), gradients=float("inf")):
        """Breaks something every now and then, for some time or until so many gradients have been counted."""
        deeds = [
            *[self._kill, self._pause] * 4,
            *[self._cut_all] * 2,
            *[partial(self._do, deed) for deed in self._victim.deeds()],
        ]
        # On a busy machine, processes that are killed while they start would never count anything.
        until(lambda: self._counted() > 0, 120)
        end = time.monotonic() + seconds
        while time.monotonic() < end and (gradients == float("inf") or self._counted() < gradients):
            time.sleep(self._random.uniform(0.1, 0.6))
            self._wake_up(time.monotonic())
            self._random.choice(deeds)()
            for name in self._running:
                assert self._is_running(name), f"{name} ended by itself: {self._last_words()}"

    def _counted(self):
        with self._victim.client() as client:
            return int(client.hget(RECORD, "applied") or 0)

    def _do(self, deed):
        self._note(f"{_name_of(deed)} begins")
        what = deed(self._random)
        self._note(what)
        self.done[what] += 1

    def _someone(self):
        return self._random.choice(sorted(self._running))

    def _kill(self):
        name = self._someone()
        self._kill_group(name)
        self._stopped.pop(name, None)
        self._note(f"kill of {name}")
        self.done[f"kills of {self._roles[name][0]}"] += 1
        self._start(name)

    def _pause(self):
        name = self._someone()
        if name not in self._stopped:
            os.killpg(self._running[name], signal.SIGSTOP)
            seconds = self._random.choice([0.1, 1.0, LONG_PAUSE])
            self._stopped[name] = time.monotonic() + seconds
            self._note(f"pause of {name} for {seconds} s")
            self.done["pauses of processes"] += 1

    def _wake_up(self, now):
        for name, end in list(self._stopped.items()):
            if end <= now:
                del self._stopped[name]
                os.killpg(self._running[name], signal.SIGCONT)

    def _cut_all(self):
        self._random.choice(self._victim.proxies()).cut_all()
        self._note("all connections of a proxy cut")
        self.done["all connections of a proxy cut"] += 1

    # Checking the result

    def _last_words(self):
        lines = [line for path in self._directory.glob("*.journal") for line in path.read_text().splitlines()]
        return "\n".join(line for line in lines if line.startswith("wrong"))[-4000:]

    def _wait_for_actors(self):
        self._wake_up(float("inf"))
        (self._directory / "stop").touch()
        deadline = time.monotonic() + 120
        for name in self._running:
            while self._is_running(name):
                assert time.monotonic() < deadline, f"{name} does not end"
                time.sleep(0.01)
            last = self._journals[name].read_text().splitlines()[-1:]
            assert last == ["end"], f"{name} failed: {self._last_words()}"
        self._running.clear()

    def _collect_garbage(self):
        self.done["garbage in partitions"] = sum(len(one["keys"]) for one in collect_garbage(self._victim.url, NAME))

    def _take_what_is_left(self, tale):
        accumulator, skip_lost = self._accumulator, False
        while True:
            info = accumulator.info()
            if info.unacknowledged:
                number = info.unacknowledged[0].num_accumulated
                block = accumulator.recover(info.unacknowledged[0].token, skip_lost=skip_lost)
            elif info.num_accumulated:
                number = info.num_accumulated
                block = accumulator.take(1, timeout=30)
            else:
                return
            try:
                with block as taken:
                    indices = indices_of(taken.gradient, taken.total_weight)
                    lost = number - taken.num_accumulated
                    assert skip_lost or not lost, f"{lost} gradients of round {taken.global_step} disappeared"
                    tale.add_round(taken.global_step, taken.num_accumulated, indices, lost)
            except redisacc.DataLossError as loss:
                if loss.part is None:
                    raise
                tale.lost_parts += 1
                skip_lost = True

    def end(self):
        """Lets every process finish, takes the remaining rounds, and compares."""
        self._note("the end")
        self._victim.weather(None)
        self._victim.calm_down()
        self._wait_for_actors()
        for proxy in self._victim.proxies():
            proxy.deliver_late()
        tale = Tale(acknowledgements_may_be_lost=self._victim.min_replicas > 0)
        for journal in self._directory.glob("*.journal"):
            tale.read(journal)
        if "Traceback" in (text := self._log.read_text()):
            tale.problems.append(f"a thread failed: {text[text.index('Traceback') :][:2000]}")
        accumulator = self._accumulator
        self._take_what_is_left(tale)
        # A taker that was killed, or whose request arrived late, is in the queue until its lease runs out.
        deadline = time.monotonic() + 30
        while accumulator.info().waiting and time.monotonic() < deadline:
            time.sleep(0.1)
        info = accumulator.info()
        tale.check(info)
        if info.waiting or info.unacknowledged:
            tale.problems.append(f"left behind: {info.waiting} {info.unacknowledged}")
        if self._partitions:
            # What arrives in a partition after its gradient was given up is left to `redisacc doctor --fix`.
            self._collect_garbage()
        with self._victim.client() as client:
            self.done["repeated requests that were recognized"] = info.duplicates
            tale.problems += leftovers(client)
            accumulator.delete()
            tale.problems += [f"after the end: {key!r}" for key in client.scan_iter() if client.pttl(key) < 0]
        self.done["gradients"], self.done["rounds"] = info.applied, info.takes
        self.done[f"gradients of kind {self._kind}"] = info.applied
        self.done["stale or refused"], self.done["rounds handed out again"] = len(tale.dropped), tale.handed_out_again
        self.done["takers that learned of a recovery"] = tale.robbed
        if info.reducer is not None:
            self.done["sums of the last reducer, in time"] = info.reducer.stored
        self.done["changes of the quorum"] = tale.configured
        self.done["rounds that a killed take_grad took along"] = info.global_step - len(tale.rounds)
        self.done["gradients that replicas did not confirm"] = tale.unconfirmed
        self.done["losses of what was not confirmed, reported"] = tale.losses
        self.done["of which were parts of gradients"] = tale.lost_parts
        self.done["gradients lost with them"] = sum(delivered.lost for delivered in tale.rounds.values())
        for proxy in self._victim.proxies():
            self.done.update({f"proxy: {what}": number for what, number in proxy.fired.items()})
        if tale.problems:
            # Before the first one, because only the first ones are printed.
            record = self._record("\n".join(tale.problems))
            tale.problems[0] = "\n".join([*record, tale.problems[0]])
        return tale


def _name_of(deed):
    """Returns the name of the method that does a deed."""
    while isinstance(deed, partial):
        deed = deed.args[-1] if deed.args else deed.func
    return deed.__name__.strip("_").replace("_", " ")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, help="how long to break things (180, unless --gradients is given)")
    parser.add_argument("--gradients", type=int, help="how many gradients to count, in pieces of 200,000")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first piece; then counted up")
    parser.add_argument("--kind", choices=KINDS, help="what the accumulators are; by default, the seed decides")
    parser.add_argument("--cluster", action="store_true", help="on a cluster of three masters")
    parser.add_argument(
        "--replicas",
        type=int,
        choices=[0, 1],
        help="of each master of the cluster, which then also fail; by default, the seed decides",
    )
    parser.add_argument("--partitions", type=int, help="of the accumulators on the cluster")
    options = parser.parse_args()
    if options.partitions and not options.cluster:
        parser.error("--partitions needs --cluster")
    chosen = {"kind": options.kind, "cluster": options.cluster, "replicas": options.replicas}
    chosen["partitions"] = options.partitions
    if options.gradients is None:
        problems = report(options.seed, *piece(options.seed, **chosen, seconds=options.seconds or 180.0))
        sys.exit(1 if problems else 0)
    total = Counter()
    seed, started = options.seed, time.monotonic()
    while total["gradients"] < options.gradients:
        goal = min(PIECE, options.gradients - total["gradients"])
        try:
            done, problems = piece(seed, **chosen, gradients=goal, seconds=options.seconds or float("inf"))
        except KeyboardInterrupt:
            # The pieces that ended are checked. The next run may begin with this seed.
            print(f"interrupted in the piece of seed {seed}")
            break
        total.update(done)
        seconds = time.monotonic() - started
        print(f"seed {seed}: {total['gradients']:,} gradients in {seconds:.0f} s, {len(problems)} problems", flush=True)
        if problems:
            report(seed, done, problems)
            sys.exit(1)
        seed += 1
    report(options.seed, total, [])


def piece(
    seed,
    *,
    kind,
    cluster,
    replicas,
    partitions,
    seconds,
    gradients=float("inf"),
):
    """Runs one piece, and returns what was done and what is wrong."""
    if cluster and replicas is None:
        # Every kind, in each of the ways to cut gradients, with replicas and without.
        replicas = seed // 4 % 2
    with Chaos(seed=seed, kind=kind, replicas=replicas if cluster else None, partitions=partitions) as chaos:
        started = time.monotonic()
        chaos.rage(seconds, gradients)
        tale = chaos.end()
        chaos.done["seconds"] = round(time.monotonic() - started)
    return chaos.done, tale.problems


def report(seed, done, problems):
    """Prints what was done and what is wrong, and returns the latter."""
    print(f"seed {seed}")
    for what, number in sorted(done.items()):
        print(f"{number:12,} {what}")
    print("\n".join(problems[:50]))
    print(f"{len(problems)} problems: " + ("FAILED" if problems else "nothing lost, nothing twice"), flush=True)
    return problems


if __name__ == "__main__":
    main()
