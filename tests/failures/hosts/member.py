"""A process of a training on a host of its own: run by the tests of this folder.

python member.py ROLE URL UNTIL: the role is "worker", "updates" or "rounds" for a chief that stands by until it leads,
or "training". Lines on standard output say what happens. A chief waits for a line of its standard input before it
publishes a step that ``hold STEP`` named at the start.
"""

import argparse
import hashlib
import logging
import sys

import numpy as np
from support.local_updates import gradient_of

import redisacc

CREW = 2
NAME = "hosts"
OPTIMIZER = redisacc.optim.AdamW(0.01, clip_norm=10.0)
BEGIN = {"w": np.ones(1000, np.float32)}


def say(*words):
    print(*words, flush=True)


def digest(tree):
    return hashlib.sha256(tree["w"].tobytes()).hexdigest()


def hold(step, given):
    """Waits before a step is published, until a line comes."""
    if step == given.hold:
        say("holds", step)
        sys.stdin.readline()


def updates(given):
    options = {"optimizer": OPTIMIZER, "workers": CREW, "standby": True, "redis": given.url}
    with redisacc.Chief(NAME, BEGIN, **options) as chief:
        say("leads", chief.step)
        for step in chief.updates(until=given.until):
            say("published", step)
            hold(step, given)
        say("ends", chief.step, digest(chief.latest()[1]))


def rounds(given):
    with redisacc.Chief(NAME, BEGIN, workers=CREW, standby=True, redis=given.url) as chief:
        say("leads", chief.step)
        for taken in chief.rounds(until=given.until):
            hold(taken.global_step, given)
            chief.publish({"w": chief.parameters["w"] - taken.gradient["w"]})
            say("published", chief.step)
        say("ends", chief.step, digest(chief.parameters))


def worker(given):
    with redisacc.Worker(NAME, redis=given.url) as one:
        for step, parameters in one.steps():
            one.apply(gradient_of(one.number, step, parameters))
    say("ends")


def training(given):
    with redisacc.Training(NAME, BEGIN, optimizer=OPTIMIZER, workers=CREW, redis=given.url) as one:
        leads = False
        for step, parameters in one.steps(until=given.until):
            if one.leads != leads:
                leads = one.leads
                say("leads" if leads else "follows", step)
            say("step", step)
            hold(step, given)
            one.apply(gradient_of(one.number, step, parameters))
        step, parameters = one.latest()
    say("ends", step, digest(parameters))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("role", type=globals().get)
    parser.add_argument("url")
    parser.add_argument("until", type=int)
    parser.add_argument("--hold", type=int)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        arguments.role(arguments)
    except redisacc.ConflictError as error:
        say("lost", error)
