"""A worker that applies gradients until it is interrupted, again and again: run by test_interrupts.py.

It says "go" when it may be interrupted, and then how many gradients have been counted.
"""

import builtins
import signal
import sys

import numpy as np

import redisacc


def interrupt(*_):
    global raised  # noqa: PLW0603
    raised = Interrupt()
    raise raised


def ignored(unraisable):
    """Ends the loop of applies: the interrupt was in a destructor, such as that of redis-py's parser."""
    global swallowed  # noqa: PLW0603
    assert unraisable.exc_value is raised, unraisable
    swallowed = True


_, url, limit, size, kind = sys.argv
# What Ctrl-C raises.
Interrupt = getattr(builtins, kind)
signal.signal(signal.SIGINT, interrupt)
sys.unraisablehook = ignored
acc = redisacc.ConditionalAccumulator(
    "float32", [int(size)], "interrupted", redis=url, limits=redisacc.Limits(in_place=int(limit))
)
gradient = np.ones(int(size), np.float32)
returned = 0
while sys.stdin.readline():
    swallowed = False
    try:
        print("go", flush=True)
        while not swallowed:
            # Every third one is stale.
            acc.apply_grad(gradient, local_step=-1 if returned % 3 == 2 else 2**62)
            returned += 1
    except Interrupt as error:
        if error is not raised:
            raise
    tally = acc.settle()
    print(returned, tally.applied, tally.stale, tally.unknown, flush=True)
