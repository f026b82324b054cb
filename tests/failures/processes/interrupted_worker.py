"""A worker that applies gradients until it is interrupted, again and again: run by test_interrupts.py.

It says "go" when it may be interrupted, and then how many gradients have been counted.
"""

import builtins
import signal
import sys

import numpy as np

import redisacc


def interrupt(*_):
    raise Interrupt


_, url, limit, size, kind = sys.argv
# What Ctrl-C raises.
Interrupt = getattr(builtins, kind)
signal.signal(signal.SIGINT, interrupt)
acc = redisacc.ConditionalAccumulator("float32", [int(size)], "interrupted", redis=url, in_place_limit=int(limit))
gradient = np.ones(int(size), np.float32)
returned = 0
while sys.stdin.readline():
    try:
        print("go", flush=True)
        while True:
            # Every third one is stale.
            acc.apply_grad(gradient, local_step=-1 if returned % 3 == 2 else 2**62)
            returned += 1
    except Interrupt:
        tally = acc.settle()
    print(returned, tally.applied, tally.stale, tally.unknown, flush=True)
