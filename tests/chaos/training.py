"""Kills the chief, the workers and the server of a training at random, and compares the result with an undisturbed one.

Now and then, a process is paused for longer than its lease lasts, another one takes its place, and then both run. With
odd seeds, reducers add up the gradients, and are killed as well. With --cluster, gradients and parameters are in
partitions of a cluster, whose nodes are killed and whose slots move. The training consists of legs: each chief finishes
it at some step, and the next one continues it. Gradients and parameters are float32, and gradients have weights and
arrive in any order. The result has the bits of a computation without Redis, or something was lost, repeated, mixed, or
added in another order than that of the workers' numbers. With --updates, the chief leaves the optimizer to
redisacc, which updates the parameters in reducers and in the chief.

python -m chaos.training --kills 50 --seed 1 --updates
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from chaos.cluster import ClusterVictim
from chaos.run import MEMORY
from chaos.server import Server
from chaos.trainee import (
    FAILED,
    FINISHED,
    FLAT,
    LEASE,
    NAME,
    OPTIMIZERS,
    TABLES,
    undisturbed,
    without_tables,
)
from support.leaks import leftovers
from support.local_updates import differences

import redisacc

TRAINEE = Path(__file__).with_name("trainee.py")
# If nothing has happened for this long, the training hangs, in seconds.
HANGS = 90.0


@dataclass
class Process:
    """A process of the training.

    Attributes:
        role: "chief", "worker" or "reducer".
        number: the number of a worker or reducer; 0 for a chief.
        run_id: of its place; another process of the same place has another one if both run at the same time.
        pid: its process id.
        paused_until: when to continue it; None: it is not paused.
    """

    role: str
    number: int
    run_id: str
    pid: int
    paused_until: float | None = None

    @property
    def place(self):
        """What only one process may be."""
        return self.role, self.number


class Training:
    """A training. ``disturb`` breaks things and keeps it going; ``end`` lets it finish, and compares.

    Attributes:
        done: what was done, and how often.
    """

    def __init__(
        self,
        *,
        seed,
        workers=3,
        legs=(3, 20),
        cluster=False,
        updates=False,
        streams=False,
    ):
        self._random = random.Random(seed)
        self._seed = seed
        self._on_cluster = cluster
        self._workers = workers
        self._legs = legs
        self._until = 0
        # In each place, the process that is to do its work.
        self._crew = {}
        # Processes that were paused, and replaced meanwhile.
        self._replaced = []
        self._reducers = []
        self._streams = streams
        if streams:
            without_tables()
        self._has_reducers = streams or (seed % 2 == 1 and (updates or not cluster))
        names = sorted(OPTIMIZERS)
        self._optimizer, self._updates = names[seed // 2 % len(names)], updates
        self._stack = contextlib.ExitStack()
        self.done = Counter()
        self.problems = []

    def __enter__(self):
        try:
            directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="training-", dir=MEMORY)))
            self._server = self._victim(directory)
            self._stack.callback(self._server.stop)
            self._server.start()
            self._log = directory / "log"
            with self._log.open("wb") as log:
                self._forker = subprocess.Popen(
                    [sys.executable, "-W", "ignore::DeprecationWarning", str(TRAINEE)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
            self._stack.callback(self._end_all)
            if self._has_reducers:
                self._reducers = [self._begin("reducer", number, "") for number in range(2)]
            self._next_leg()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_):
        self._stack.close()

    def _victim(self, directory):
        if not self._on_cluster:
            return Server(directory)
        victim = ClusterVictim(directory, f"redisacc:{{{NAME}}}", replicas=0, seed=self._seed)
        victim.keys += [f"redisacc:{{{NAME}/{number:05}}}" for number in range(3)]
        return victim

    # Processes

    def _ask(self, task):
        print(json.dumps(task), file=self._forker.stdin, flush=True)
        return json.loads(self._forker.stdout.readline())

    def _start(self, role, number, run_id):
        self._crew[role, number] = self._begin(role, number, run_id)

    def _begin(self, role, number, run_id):
        self.done["processes"] += 1
        pid = self._ask(
            {
                "role": role,
                "url": self._server.url,
                "number": number,
                "workers": self._workers,
                "until": self._until,
                "run_id": run_id,
                "partitions": 3 if self._on_cluster else None,
                "optimizer": self._optimizer,
                "updates": self._updates,
                "streams": self._streams,
            }
        )
        return Process(role, number, run_id, pid)

    def _status(self, process):
        return self._ask({"reap": process.pid})

    def _end_all(self):
        for process in [*self._crew.values(), *self._replaced, *self._reducers]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self._forker.stdin.close()
        self._forker.stdout.close()
        self._forker.wait(20)

    def _next_leg(self):
        self._until += self._random.randint(*self._legs)
        self.done["legs"] += 1
        self._start("chief", 0, "chief")
        for number in range(self._workers):
            if ("worker", number) not in self._crew:
                self._start("worker", number, f"worker{number}")

    def _look_after(self):
        """Starts processes again that have ended. Returns whether this leg has come to its end."""
        now = time.monotonic()
        for process in [*self._crew.values(), *self._replaced]:
            if process.paused_until is not None and now >= process.paused_until:
                process.paused_until = None
                os.kill(process.pid, signal.SIGCONT)
        for process in list(self._replaced):
            status = self._status(process)
            if status is not None:
                self._replaced.remove(process)
                self.done["replaced processes that noticed it" if status else "replaced ones that saw the end"] += 1
                self._note(process, status)
        for process in list(self._crew.values()):
            status = self._status(process)
            if status is None:
                continue
            self._note(process, status)
            del self._crew[process.place]
            # A worker that sees the end of the last leg, before the chief continues, comes again.
            if status != FINISHED or ("chief", 0) in self._crew:
                self._start(*process.place, process.run_id)
        return not self._crew and not self._replaced

    def _note(self, process, status):
        if status == FAILED:
            self.problems.append(f"{process.role} {process.number} failed")

    # Breaking things

    def disturb(self, kills):
        """Kills so many times, and starts what it has killed."""
        while sum(number for what, number in self.done.items() if what.startswith("kills")) < kills:
            if self.problems:
                return
            if self._look_after():
                self._next_leg()
            self._let_it_train(self._random.choice([0, 0, 1, 3]))
            time.sleep(self._random.choice([0.0, 0.02, 0.1]))
            what = self._random.random()
            if what < 0.2:
                self._kill_server()
            elif what < 0.3:
                self.replace()
            elif what < 0.45 and self._reducers:
                self._kill_reducer()
            elif self._crew:
                self._kill(self._random.choice(sorted(self._crew)))

    def _let_it_train(self, steps):
        """Waits until so many more steps are published; not for long, because they may wait for one that is paused."""
        until = time.monotonic() + 3.0
        with self._server.client() as client:
            first = self._step(client)
            while self._step(client) < first + steps and time.monotonic() < until and not self._look_after():
                time.sleep(0.01)

    @staticmethod
    def _step(client):
        return int(client.hget(f"redisacc:{{{NAME}}}:parameters", "step") or 0)

    def _kill(self, place):
        process = self._crew[place]
        os.kill(process.pid, signal.SIGKILL)
        while self._status(process) is None:
            time.sleep(0.001)
        self.done[f"kills of {process.role}"] += 1
        del self._crew[place]
        if self._random.random() < 0.3:
            # A little later, if another one is killed meanwhile.
            time.sleep(self._random.choice([0.05, 0.3]))
        self._start(*place, process.run_id)

    def _kill_reducer(self):
        process = self._reducers.pop(0)
        os.kill(process.pid, signal.SIGKILL)
        while self._status(process) is None:
            time.sleep(0.001)
        self.done["kills of reducer"] += 1
        self._reducers.append(self._begin("reducer", process.number, ""))

    def _kill_server(self):
        if isinstance(self._server, ClusterVictim):
            self.done[self._random.choice(self._server.deeds())(self._random)] += 1
            return
        self._server.kill()
        time.sleep(self._random.choice([0.0, 0.1, 0.4]))
        self._server.start()
        self.done["kills of the server"] += 1

    def replace(self):
        """Pauses a process for longer than its lease lasts, and starts another one in its place."""
        if not self._crew or self._replaced:
            return
        process = self._crew[self._random.choice(sorted(self._crew))]
        os.kill(process.pid, signal.SIGSTOP)
        self.done[f"two of one place: {process.role}"] += 1
        process.paused_until = time.monotonic() + LEASE + self._random.choice([0.3, 1.0])
        self._replaced.append(process)
        self._start(*process.place, f"{process.role}{process.number}-{self.done['processes']}")

    # Checking the result

    def end(self):
        """Waits for the training to finish, and compares its result."""
        self._server.calm_down()
        deadline = time.monotonic() + HANGS
        while not self._look_after() and not self.problems:
            if time.monotonic() > deadline:
                self.problems.append(f"it hangs: {self._state()}")
                break
            time.sleep(0.02)
        if self.problems:
            self.problems.append(self._log.read_text()[-6000:])
            return
        with self._server.client() as client, redisacc.Parameters(NAME, redis=client) as parameters:
            latest, state = parameters.latest(), parameters.latest_state()
            assert latest is not None
            assert state is not None
            self.done["steps"] = step = latest[0]
            if step != self._until:
                self.problems.append(f"step {step} instead of {self._until}")
            state[1].pop("updates", None)
            local = undisturbed(self._workers, step, self._optimizer)
            self.problems += [f"{name} differs" for name in differences(local, latest[1], state[1])]
            with redisacc.TreeAccumulator.like(
                FLAT, NAME, sparse=[*TABLES], redis=client, once_per_worker=True
            ) as gradients:
                info = gradients.info()
                if info.unacknowledged or info.global_step != step:
                    self.problems.append(f"left behind: step {info.global_step}, {info.unacknowledged}")
                self.done["gradients"] = info.applied
                if info.reducer is not None:
                    self.done["sums of the last reducer, in time"] = info.reducer.stored
                    self.done["sums of the last reducer, late"] = info.reducer.late
                self.problems += leftovers(client)

    def _state(self):
        return f"{sorted(self._crew)}, {len(self._replaced)} replaced, until {self._until}"


def train(seed, kills, *, cluster=False, updates=False, streams=False):
    """Runs a training, and returns what was done and what is wrong."""
    with Training(seed=seed, cluster=cluster, updates=updates, streams=streams) as training:
        started = time.monotonic()
        training.disturb(kills)
        training.end()
        training.done["seconds"] = round(time.monotonic() - started)
    return training.done, training.problems


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50, help="how often to kill a process or the server")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--cluster", action="store_true", help="in partitions of a cluster")
    parser.add_argument("--updates", action="store_true", help="with an optimizer")
    parser.add_argument("--streams", action="store_true", help="with an optimizer, and gradients sent leaf by leaf")
    options = parser.parse_args()
    updates = options.updates or options.streams
    done, problems = train(
        options.seed, options.kills, cluster=options.cluster, updates=updates, streams=options.streams
    )
    print(f"training, seed {options.seed}{', with an optimizer' * updates}")
    for what, number in sorted(done.items()):
        print(f"{number:12,} {what}")
    print("\n".join(problems[:50]))
    print(f"{len(problems)} problems: " + ("FAILED" if problems else "the same bits as undisturbed"), flush=True)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
