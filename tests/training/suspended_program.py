"""A program that two processes of a training run: run by test_suspension.py.

python suspended_program.py URL NAME UNTIL KIND. Says each step, and in the end the digest of the weights. Its leases
are short.
"""

import hashlib
import sys

import numpy as np

import redisacc
from redisacc._clock import durations

_, url, name, until, kind = sys.argv
for what, seconds in {"lease": 1.5, "taker_lease": 1.0, "standby_asks_every": 0.2, "look_every": 0.2}.items():
    setattr(durations, what, seconds)


def add(taken, parameters, state):
    return {"w": parameters["w"] + taken.gradient["w"]}, {"n": state["n"] + 1}


how = {"optimizer": redisacc.optim.AdamW(0.01)} if kind == "optimizer" else {"update": add, "state": {"n": np.array(0)}}
begin = {"w": np.ones(1000, np.float32)}
with redisacc.Training(name, begin, workers=2, redis=url, **how) as one:
    for step, found in one.steps(until=int(until)):
        print("leads" if one.leads else "works", step, flush=True)
        one.apply({"w": np.sin(found["w"]) + np.float32(step + one.number)})
    step, found = one.latest()
print("ends", step, hashlib.sha256(found["w"].tobytes()).hexdigest(), flush=True)
