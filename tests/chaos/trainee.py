"""A training in float32, whose result is known bit for bit, and a program that forks its processes.

The program reads lines of JSON: the arguments of `work`. The answer to each is the id of a new process.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from typing import Any

import numpy as np
from support.local_updates import LocalTraining

import redisacc
from redisacc import optim
from redisacc._clock import durations
from redisacc.optim import Optimizer
from redisacc.types import GradientOptions

NAME = "training"
# Elements of the weights: gradients have several parts, are announced, and are left to reducers.
SIZE = 150_000
ROWS = 16
# A lease that a test can wait for, in seconds.
LEASE = 1.5

# How a process ends.
FINISHED, FAILED, REPLACED = 0, 1, 3


def beginning():
    """Returns the parameters and the state before the first step."""
    parameters = {"w": np.arange(SIZE, dtype=np.float32) / SIZE, "table": np.zeros((ROWS, 2), np.float32)}
    return parameters, {"momentum": np.full(SIZE, 0.3, np.float32)}


def gradient_of(number, step, parameters):
    """Returns the gradient of a worker. It depends on every parameter that it touches.

    Other magnitudes for each worker: with three of them or more, any other order of addition gives other bits.
    """
    w, table = parameters["w"], parameters["table"]
    rows = np.unique([(3 * step + number) % ROWS, (step + 5 * number) % ROWS, 7])
    return {
        "w": (w * (31 + number) + 0.7 * step) % 1.0 * 3.0**number,
        "table": redisacc.IndexedSlices((table[rows] * 5 + w[:2] + number / 7 + step) % 1.0, rows, (ROWS, 2)),
    }


def weight_of(number):
    """Returns the weight of a worker's gradients."""
    return 1.0 + number / 3


def after(parameters, state, mean):
    """Returns the parameters and the state that follow from the mean of all gradients, and the rows that changed.

    They stay below 1, and one other bit soon changes all of them.
    """
    momentum = (state["momentum"] * 3 + mean["w"]) % 1.0
    table, rows = np.array(parameters["table"]), mean["table"].indices
    table[rows] = (table[rows] + mean["table"].values) % 1.0
    return {"w": (parameters["w"] + momentum) % 1.0, "table": table}, {"momentum": momentum}, {"table": rows}


def undisturbed(workers, steps):
    """Returns the parameters and the state after so many steps, without Redis: gradients are added by number."""
    parameters, state = beginning()
    for step in range(steps):
        table = np.zeros((ROWS, 2), np.float32)
        touched: set[int] = set()
        total_w, whole = np.zeros(SIZE, np.float32), 0.0
        for number in range(workers):
            gradient = gradient_of(number, step, parameters)
            weight = np.float32(weight_of(number))
            whole += weight_of(number)
            total_w += gradient["w"] * weight
            table[gradient["table"].indices] += gradient["table"].values * weight
            touched.update(gradient["table"].indices.tolist())
        rows = np.array(sorted(touched))
        divisor = np.float32(whole)
        mean = {"w": total_w / divisor, "table": redisacc.IndexedSlices(table[rows] / divisor, rows, (ROWS, 2))}
        parameters, state, _ = after(parameters, state, mean)
    return parameters, state


# The optimisers of trainings with updates. Their state covers every kind of slot. One asks for the norm, but never
# clips, as the last bits of the norm depend on the parts.
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": optim.AdamW(lambda step: 0.1 / (1 + step % 7), ema=0.9, clip_norm=1e12),
    "sgd": optim.SGD(0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "rmsprop": optim.RMSprop(0.01, centered=True, momentum=0.5),
    "lion": optim.Lion(0.01),
}
# Two dtypes, in several parts, and a table, whose gradients are rows.
FLAT = {
    "a": np.linspace(-1, 1, SIZE, dtype=np.float32),
    "b": np.linspace(-2, 1, 9),
    "c": np.ones((3, 5), np.float32),
    "table": np.linspace(-1, 2, 300, dtype=np.float32).reshape(100, 3),
}
TABLES = ["table"]


def without_tables():
    """Lets all gradients be dense, in this process: with tables, they do not leave leaf by leaf."""
    TABLES.clear()


def flat_gradient_of(number, step, parameters):
    """Returns the gradient of a worker for a training with an optimiser."""
    found: dict[str, Any] = {
        path: ((values * (31 + number) + 0.7 * step) % 1.0 * 3.0**number - 2).astype(values.dtype)
        for path, values in parameters.items()
    }
    for path in TABLES:
        rows = np.unique([(3 * step + number) % 100, (step + 5 * number) % 100, (step * step) % 7, 7])
        found[path] = redisacc.IndexedSlices(found[path][rows], rows)
    return found


def lead_updates(url, workers, until, partitions, optimizer):
    rows = GradientOptions(sparse=tuple(TABLES), partitions=partitions)
    with redisacc.Chief(
        NAME, FLAT, workers=workers, optimizer=OPTIMIZERS[optimizer], redis=url, accumulator=rows
    ) as training:
        for _ in training.updates(until=until):
            time.sleep(random.choice([0, 0, 0.003]))


def undisturbed_updates(workers, steps, optimizer):
    """Returns the training with an optimiser after so many steps, without Redis."""
    weights = list(map(weight_of, range(workers)))
    return LocalTraining(OPTIMIZERS[optimizer], FLAT, weights=weights, gradient=flat_gradient_of).train(steps)


def chief(url, workers, until, partitions):
    parameters, state = beginning()
    with redisacc.Chief(
        NAME,
        parameters,
        workers=workers,
        state=state,
        accumulator={"sparse": ["table"], "partitions": partitions},
        redis=url,
    ) as training:
        for taken in training.rounds(until=until):
            parameters, state, changed = after(training.parameters, training.state, taken.gradient)
            time.sleep(random.choice([0, 0, 0.003]))
            training.publish(parameters, changed=changed, state=state)


def worker(url, number, optimizer, streams):
    compute = flat_gradient_of if optimizer else gradient_of
    with redisacc.Worker(NAME, number=number, redis=url) as training:
        for step, parameters in training.steps():
            time.sleep(random.choice([0, 0, 0.003]))
            gradient = compute(number, step, parameters)
            if not streams:
                training.apply(gradient, weight=weight_of(number))
                continue
            under_way = training.begin()
            for path in random.sample(sorted(gradient), len(gradient)):
                under_way.put(path, gradient[path])
                time.sleep(random.choice([0, 0, 0.003]))
            if random.random() < 0.05:
                under_way.abandon()
                training.apply(gradient, weight=weight_of(number))
            else:
                under_way.commit(weight=weight_of(number))


def work(
    role,
    url,
    number,
    workers,
    until,
    run_id,
    partitions=None,
    optimizer="",
    streams=False,
):
    """Does the work of a process, and returns how it ended."""
    durations.lease, durations.reducer_lease, durations.continued_within = LEASE, 0.6, 1.0
    durations.without_reducer = durations.longest_without_reducer = 0.1
    if streams:
        without_tables()
    os.environ["REDISACC_RUN_ID"] = run_id
    try:
        if role == "reducer":
            redisacc.Reducer(NAME, redis=url).run()
        elif role == "chief" and optimizer:
            lead_updates(url, workers, until, partitions, optimizer)
        elif role == "chief":
            chief(url, workers, until, partitions)
        else:
            worker(url, number, optimizer, streams)
    except redisacc.ConflictError:
        return REPLACED
    except redisacc.ServerUnavailableError as error:
        # The server was away when this process began.
        print(f"{role} {number}: {error}", file=sys.stderr)
        return REPLACED
    return FINISHED


def main():
    for line in sys.stdin:
        task = json.loads(line)
        if "reap" in task:
            # The status of a process: None while it runs, and minus the signal if it was killed.
            pid, status = os.waitpid(task["reap"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            random.seed()
            status = FAILED
            try:
                status = work(**task)
            except BaseException:
                print(f"{task['role']} {task['number']}:", file=sys.stderr)
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
