"""A taker that is interrupted at a random moment of each of its takes: run by test_interrupts.py.

Gradient number i is 1 at element i. The program says how often it has received each of them, and how many takes were
interrupted.
"""

import builtins
import json
import random
import signal
import sys

import numpy as np

import redisacc


def interrupt(*_):
    global raised  # noqa: PLW0603
    raised = Interrupt()
    raise raised


def ignored(unraisable):
    """Interrupts the take again: it was in a destructor, such as that of redis-py's parser, and Python ignored that."""
    global raised  # noqa: PLW0603
    assert unraisable.exc_value is raised, unraisable
    raised = None
    signal.setitimer(signal.ITIMER_REAL, 0.0001)


def interrupted_take(seconds):
    """Returns what a take returns, or None if it is interrupted before it returns."""
    global raised  # noqa: PLW0603
    value = raised = None
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        value = acc.take_grad(1)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Interrupt as error:
        if error is not raised:
            raise
    else:
        assert raised is None, "the take has swallowed what the handler raised"
    return value


_, url, limit, partitions, number, kind = sys.argv
number = int(number)
# What the signal handler raises.
Interrupt = getattr(builtins, kind)
options = {"redis": url, "limits": redisacc.Limits(in_place=int(limit)), "partitions": int(partitions) or None}
acc, direct = (
    redisacc.ConditionalAccumulator("float32", [number], "taken", reduction_type="SUM", **options) for _ in range(2)
)
signal.signal(signal.SIGALRM, interrupt)
sys.unraisablehook = ignored
draws = random.Random(f"{limit} {partitions}")
received = np.zeros(number)
interrupted = 0
# How long a take needs, in seconds, as it turns out. Later ones are interrupted within that time.
longest = 0.002
for one in range(number):
    direct.apply_grad(np.eye(1, number, one, dtype=np.float32)[0], local_step=2**62)
    value = interrupted_take(draws.uniform(0, longest))
    if value is None:
        interrupted += 1
        longest = min(longest * 1.05, 0.1)
    else:
        received += value
        longest *= 0.95
while True:
    try:
        received += acc.take_grad(1, timeout=0)
    except redisacc.TakeTimeoutError:
        break
for _ in direct.info().unacknowledged:
    with direct.recover() as taken:
        received += taken.gradient
print(json.dumps([received.tolist(), interrupted]))
