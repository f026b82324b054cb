from model import batch, gradient

import redisacc

with redisacc.Worker("two-machines") as worker:
    for step, parameters in worker.steps():
        worker.apply(gradient(parameters, *batch(step, worker.number)))
