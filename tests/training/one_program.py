"""A program that every process of a training runs: run by test_one_program.py.

python one_program.py URL UNTIL CREW. Says each step, and who leads, and in the end the digest of the parameters.
"""

import hashlib
import sys
from pathlib import Path

import numpy as np

import redisacc

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.local_updates import gradient_of

_, url, until, crew = sys.argv
optimizer = redisacc.optim.AdamW(0.01, clip_norm=10.0)
with redisacc.Training(
    "train", {"w": np.ones(1000, np.float32)}, optimizer=optimizer, workers=int(crew), redis=url
) as t:
    for step, parameters in t.steps(until=int(until)):
        print("leads" if t.leads else "works", step, flush=True)
        t.apply(gradient_of(t.number, step, parameters))
    step, parameters = t.latest()
print("ends", step, hashlib.sha256(parameters["w"].tobytes()).hexdigest(), flush=True)
