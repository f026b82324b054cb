"""Many real processes on one accumulator: each gradient is in exactly one round, and takers are served in order."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
import support
from support.leaks import remaining
from support.until import until
from support.warm_python import PIPE, WarmPython

import redisacc

PROGRAM = Path(support.__file__).with_name("crew_member.py")
APPLIERS = 8
REQUIRED = (7, 16)


class Crew:
    """Processes of crew_member.py, and the results that they wrote down."""

    def __init__(self, url, kind, storage, directory):
        self._common = url, kind, storage
        self._directory = directory
        self._pids = {}
        self._program = WarmPython([str(PROGRAM)], stdin=PIPE, stderr=sys.stderr, text=True)

    def start(self, role, number, count):
        out = self._directory / f"{role}{number}"
        print(json.dumps([role, *self._common, number, count, str(out)]), file=self._program.stdin, flush=True)
        self._pids[role, number] = int(self._program.stdout.readline())

    def result(self, role, number):
        out = self._directory / f"{role}{number}"

        def is_there():
            runs = self._alive(self._pids[role, number])
            there = out.exists()
            assert there or runs, f"{role}{number} failed"
            return there

        until(is_there, 60, details=lambda: f"{role}{number} does not end")
        return json.loads(out.read_text())

    @staticmethod
    def _alive(pid):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True

    def stop(self):
        (self._directory / "stop").touch()

    def end(self):
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._program.stdin.close()
        self._program.stdout.close()
        self._program.wait(20)


@pytest.fixture
def crew(tmp_path, real_server, storage):
    crews = []

    def make(kind):
        crews.append(Crew(real_server.url, kind, storage, tmp_path))
        return crews[-1]

    yield make
    for one in crews:
        one.end()


def run(crew, each):
    """Returns all replies to eight appliers, and every round of the two takers."""
    for number, required in enumerate(REQUIRED):
        crew.start("take", number, required)
    for number in range(APPLIERS):
        crew.start("apply", number, each)
    told = [crew.result("apply", number)["results"] for number in range(APPLIERS)]
    crew.stop()
    takers = [crew.result("take", number) for number in range(len(REQUIRED))]
    for taker in takers:
        assert all(count >= taker["required"] for _, count, _, _ in taker["rounds"])
    return told, [one for taker in takers for one in taker["rounds"]], takers


def rest(acc, sparse):
    """Returns the gradients that are left at the end, as one more round."""
    looked = acc.peek()
    if looked.num_accumulated == 0:
        return []
    with acc.take(1, timeout=0) as taken:
        gradient = taken.gradient
        content = [gradient.indices.tolist(), gradient.values.tolist()] if sparse else gradient.tolist()
        return [(taken.global_step, taken.num_accumulated, taken.workers, content)]


def check_counts(told, rounds, acc):
    """Compares steps, counts and workers of the rounds with the replies to each applier."""
    rounds = sorted(rounds, key=lambda one: one[0])
    assert [step for step, *_ in rounds] == list(range(len(rounds)))
    accepted = Counter()
    places = {}
    workers = {}
    for number, results in enumerate(told):
        for _, outcome, step, count in results:
            if outcome == "applied":
                accepted[step] += 1
                places.setdefault(step, set()).add(count)
                by = workers.setdefault(step, Counter())
                by[f"apply{number}"] += 1
    for step, count, by, _ in rounds:
        assert accepted[step] == count
        # Each reply named the gradient's own place, from first to last.
        assert places[step] == set(range(1, count + 1))
        assert workers[step] == Counter(by)
    assert sum(accepted.values()) == sum(count for _, count, *_ in rounds)
    info = acc.info()
    assert info.applied == sum(accepted.values())
    assert info.applied + info.stale == sum(len(results) for results in told)
    assert (info.takes, info.global_step, info.duplicates) == (len(rounds), len(rounds), 0)
    assert (info.waiting, info.unacknowledged) == ([], [])


@pytest.mark.slow
@pytest.mark.timeout(100)
@pytest.mark.servers("valkey")
def test_every_accepted_gradient_is_in_exactly_one_round(crew, real_client, open_sparse_stored, everything):
    acc = open_sparse_stored("float64", [None, 4], "crew", reduction_type="SUM")
    told, rounds, takers = run(crew("sparse"), 1000 if everything else 300)
    rounds += rest(acc, sparse=True)
    check_counts(told, rounds, acc)
    step_of = {}
    for step, count, _, (indices, values) in rounds:
        assert len(indices) == count
        for index, row in zip(indices, values, strict=True):
            assert index not in step_of
            assert row == [index + 0.5] * 4
            step_of[index] = step
    # Each is in the round that the reply to its applier named.
    promised = {
        number * 1_000_000 + k: step
        for number, results in enumerate(told)
        for k, outcome, step, _ in results
        if outcome == "applied"
    }
    assert step_of == promised
    assert all(taker["rounds"] for taker in takers)
    acc.delete()
    assert remaining(real_client) == []


@pytest.mark.slow
@pytest.mark.timeout(100)
@pytest.mark.servers("redis62")
def test_dense_gradients_of_many_processes_add_up(crew, real_client, open_dense_stored):
    acc = open_dense_stored("int32", [16], "crew", reduction_type="SUM")
    told, rounds, _ = run(crew("dense"), 200)
    rounds += rest(acc, sparse=False)
    check_counts(told, rounds, acc)
    expected = {}
    for number, results in enumerate(told):
        for k, outcome, step, _ in results:
            if outcome == "applied":
                sums = expected.setdefault(step, [0] * 16)
                sums[number] += 1
                sums[8 + number] += k
    assert {step: content for step, _, _, content in rounds} == expected
    acc.delete()
    assert remaining(real_client) == []


@pytest.mark.slow(keep="buffered_inline")
@pytest.mark.servers("valkey")
def test_processes_are_served_in_order_of_arrival(crew, open_dense_stored, until):
    acc = open_dense_stored("int32", [16], "crew", reduction_type="SUM", worker="chief")
    team = crew("dense")
    takers = 4
    for number in range(takers):
        team.start("once", number, 0)
        until(lambda expected=number + 1: len(acc.info().waiting) == expected)
    assert [one.taker for one in acc.info().waiting] == [f"once{number}" for number in range(takers)]
    for step in range(takers):
        acc.apply_grad([0] * 16, local_step=step)
        assert team.result("once", step) == {"step": step, "workers": {"chief": 1}}
    with pytest.raises(redisacc.TakeTimeoutError):
        acc.take_grad(1, timeout=0)
    acc.delete()
