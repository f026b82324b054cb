"""A training of real processes that waits for everybody: workers are killed or stand still, and come back."""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import support
from support.elastic_worker import NAME
from support.warm_python import PIPE, WarmPython

import redisacc

pytestmark = pytest.mark.servers("valkey")

PROGRAM = Path(support.__file__).with_name("elastic_worker.py")


@pytest.fixture
def hire(real_server, clock):
    """Starts a worker with a number, and returns what sends a signal to it."""
    program = WarmPython([str(PROGRAM)], stdin=PIPE, stderr=sys.stderr, text=True, env=clock.env)
    pids = []

    def start(number):
        print(json.dumps([real_server.url, number]), file=program.stdin, flush=True)
        pids.append(int(program.stdout.readline()))
        pid = pids[-1]
        return lambda signum: os.kill(pid, signum)

    yield start
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    program.stdin.close()
    program.stdout.close()
    program.wait(20)


@pytest.fixture
def until_rounds(real_client, durations, clock):
    """Leads the training until a number of rounds in succession have had certain workers."""
    durations(look_every=0.05)
    with redisacc.Chief(
        NAME,
        {"w": np.zeros(2, np.int64)},
        workers="all",
        quorum=2,
        accumulator={"reduction_type": "SUM"},
        redis=real_client,
    ) as chief:
        rounds = chief.rounds()

        def lead(numbers, number=3):
            expected, seen = sorted(f"worker {one}" for one in numbers), 0
            # Steps are faster than the chief's looks at the leases, so some rounds are whole before it knows.
            while seen < number or chief.workers != len(expected):
                taken = next(rounds)
                # Nobody's gradient is lost, and nobody's counts twice.
                assert taken.gradient["w"].tolist() == [len(taken.workers)] * 2
                assert taken.num_accumulated == len(taken.workers) >= 2
                chief.publish({"w": chief.parameters["w"] + taken.gradient["w"]})
                seen = seen + 1 if sorted(taken.workers) == expected else 0

        with clock.running():
            yield lead
        rounds.close()
        chief.delete()


def test_a_crew_shrinks_and_grows(hire, until_rounds):
    crew = [hire(number) for number in range(4)]
    until_rounds(range(4))
    for kill in crew[2:]:
        kill(signal.SIGKILL)
    until_rounds((0, 1))
    # One that stands still is waited for until its lease ends.
    crew[1](signal.SIGSTOP)
    hire(2)
    until_rounds((0, 2))
    crew[1](signal.SIGCONT)
    hire(3)
    until_rounds(range(4))
