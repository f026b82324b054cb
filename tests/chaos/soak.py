"""Applies and takes for long, and sees that neither the server, nor a client, nor any key that isn't data grows.

python tests/chaos/soak.py --seconds 300
"""

import argparse
import gc
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import redisacc
from redisacc import embedded

# Elements of float32: in place; as fields of a hash; in parts; in parts, asked for first.
SHAPES = {"in place": 100, "inline": 5_000, "parts": 40_000, "large": 1_200_000}
WORKERS = 4
# The noise of memory: what the server's allocator keeps, and in a client also numpy's arrays.
NOISE_BYTES = {"server": 2 * 2**20, "client": 24 * 2**20}


@dataclass(frozen=True)
class Memory:
    """Returns the memory in use, in bytes, after all rounds."""

    server: int
    client: int
    keys: dict[str, int]


class Soak:
    """Accumulators of every size, through whole rounds; new handles and clients all the time."""

    def __init__(self, server):
        self._server = server
        self._takers = {what: self._open(what) for what in SHAPES}
        self.gradients = 0
        self._workers = {what: [self._open(what) for _ in range(WORKERS)] for what in SHAPES}

    def _open(self, what):
        # A limit so small that clients have to compact.
        size = SHAPES[what]
        return redisacc.ConditionalAccumulator(
            "float32",
            [size],
            f"soak {what}",
            reduction_type="SUM",
            redis=self._server,
            limits=redisacc.Limits(buffer=3 * 4 * size),
        )

    def round(self, number):
        """One round of each accumulator, with one worker that is new, one gradient that is stale, and one look."""
        for what, size in SHAPES.items():
            if what == "large" and number % 20:
                continue
            taker, workers = self._takers[what], self._workers[what]
            workers[number % WORKERS] = self._open(what)
            step = taker.global_step()
            for k, worker in enumerate(workers):
                assert worker.apply_grad(np.full(size, 2.0**k, np.float32), local_step=step)
            assert not workers[0].apply_grad(np.ones(size, np.float32), local_step=step - 1)
            if number % 7 == 0:
                assert taker.peek().gradient[0] == 2.0**WORKERS - 1
                taker.info()
            gradient = taker.take_grad(WORKERS, timeout=60)
            assert gradient[0] == gradient[-1] == 2.0**WORKERS - 1
            self.gradients += WORKERS
        with redisacc.SparseConditionalAccumulator("float64", [None, 4], redis=self._server) as private:
            private.apply_grad([number % 1000], np.ones((1, 4)))
            private.take_grad(1)

    def age_clients(self):
        """Ages all sessions by two hours, except the latest of each accumulator."""
        for what in SHAPES:
            key = f"redisacc:{{soak {what}}}:sessions"
            for name, text in self._server.hgetall(key).items():
                words = text.decode().split(" ")
                words[4] = str(int(words[4]) - 2 * 3_600_000)
                self._server.hset(key, name, " ".join(words))
        # After that, the server would reply that they are forgotten, and they would continue under new ids.
        for handle in [*self._takers.values(), *(worker for workers in self._workers.values() for worker in workers)]:
            for session in handle._requests.sessions._idle:
                session.begin_anew(session.born_ms)

    def memory(self):
        gc.collect()
        keys = {}
        for key in sorted(self._server.scan_iter(count=1000)):
            keys[key.decode()] = int(self._server.memory_usage(key, samples=0))
        self._server.execute_command("MEMORY", "PURGE")
        # A server whose disk is slow holds back what it would write.
        deadline = time.monotonic() + 30
        while self._server.info("persistence").get("aof_buffer_length", 0) and time.monotonic() < deadline:
            time.sleep(0.05)
        return Memory(int(self._server.info("memory")["used_memory"]), _resident_bytes(), keys)

    def end(self):
        for taker in self._takers.values():
            taker.delete()


def _resident_bytes():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS")


def growth(before, after, *, rounds):
    """Returns what has grown by more than the noise, however many rounds there were in between."""
    found = []
    for what, was, now in (("server", before.server, after.server), ("client", before.client, after.client)):
        if now > was + NOISE_BYTES[what]:
            found.append(f"the {what} grew from {was} to {now} bytes in {rounds} rounds")
    found += [f"a key that was not there before: {key}" for key in after.keys.keys() - before.keys.keys()]
    # Tables of clients and workers change with each of those.
    found += [
        f"{key} grew from {before.keys[key]} to {after.keys[key]} bytes in {rounds} rounds"
        for key in after.keys.keys() & before.keys.keys()
        if after.keys[key] > 1.5 * before.keys[key] + 2048
    ]
    return found


def soak(client, *, warm_up, rounds):
    """Soaks for as many rounds as there are. Returns what grew after the first few."""
    run = Soak(client)
    for number in range(warm_up):
        run.round(number)
        run.age_clients()
    before = run.memory()
    number = 0
    for number in rounds:
        run.round(number)
        if number % 5 == 0:
            run.age_clients()
    found = growth(before, run.memory(), rounds=number + 1)
    run.end()
    return run, found


def _for(seconds):
    until = time.monotonic() + seconds
    number = 0
    while time.monotonic() < until:
        yield number
        number += 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=300.0)
    options = parser.parse_args()
    with embedded.Server() as server, server.client() as client:
        run, found = soak(client, warm_up=60, rounds=_for(options.seconds))
    print(f"{run.gradients} gradients")
    print("\n".join(found) or "nothing grew")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
