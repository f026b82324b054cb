"""A training in float32, whose result is known bit for bit, and a program that forks its processes.

The program reads lines of JSON: the arguments of `work`. The answer to each is the id of a new process.
"""

import copy
import json
import os
import random
import signal
import sys
import time
import traceback

import numpy as np
from support.local_updates import LocalTraining

import redisacc
from redisacc import optim
from redisacc._clock import durations
from redisacc.types import GradientOptions

NAME = "training"
# Elements of the weights: gradients have several parts, are announced, and are left to reducers.
SIZE = 150_000
# A lease that a test can wait for, in seconds.
LEASE = 1.5

# How a process ends.
FINISHED, FAILED, REPLACED = 0, 1, 3


def weight_of(number):
    """Returns the weight of a worker's gradients."""
    return 1.0 + number / 3


# Their state covers every kind of slot. One asks for the norm, but never clips, as the last bits of the norm depend on
# the parts.
OPTIMIZERS = {
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


def gradient_of(number, step, parameters):
    """Returns the gradient of a worker. It depends on every parameter that it touches.

    Other magnitudes for each worker: with three of them or more, any other order of addition gives other bits.
    """
    found = {
        path: ((values * (31 + number) + 0.7 * step) % 1.0 * 3.0**number - 2).astype(values.dtype)
        for path, values in parameters.items()
    }
    for path in TABLES:
        rows = np.unique([(3 * step + number) % 100, (step + 5 * number) % 100, (step * step) % 7, 7])
        found[path] = redisacc.IndexedSlices(found[path][rows], rows)
    return found


def undisturbed(workers, steps, optimizer):
    """Returns the training after so many steps, without Redis: gradients are added by number."""
    weights = list(map(weight_of, range(workers)))
    return LocalTraining(OPTIMIZERS[optimizer], FLAT, weights=weights, gradient=gradient_of).train(steps)


def chief(url, workers, until, partitions, optimizer, updates):
    options = {"accumulator": GradientOptions(sparse=tuple(TABLES), partitions=partitions), "redis": url}
    if updates:
        with redisacc.Chief(NAME, FLAT, workers=workers, optimizer=OPTIMIZERS[optimizer], **options) as training:
            for _ in training.updates(until=until):
                time.sleep(random.choice([0, 0, 0.003]))
        return
    # The same optimizer, in an update of our own: that of one worker, whose gradient is the mean.
    local = LocalTraining(OPTIMIZERS[optimizer], FLAT)
    with redisacc.Chief(NAME, FLAT, workers=workers, state=local.state, **options) as training:
        for taken in training.rounds(until=until):
            local.parameters, local.state = copy.deepcopy((training.parameters, training.state))
            local.step = local.updates = training.step
            local._gradient = lambda *_, mean=taken.gradient: mean
            local.train(training.step + 1)
            time.sleep(random.choice([0, 0, 0.003]))
            rows = {path: taken.gradient[path].indices for path in TABLES}
            training.publish(local.parameters, changed=rows, state=local.state)


def worker(url, number, streams):
    with redisacc.Worker(NAME, number=number, redis=url) as training:
        for step, parameters in training.steps():
            time.sleep(random.choice([0, 0, 0.003]))
            gradient = gradient_of(number, step, parameters)
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


def work(role, url, number, workers, until, run_id, partitions, optimizer, updates, streams):
    """Does the work of a process, and returns how it ended."""
    durations.lease, durations.reducer_lease, durations.continued_within = LEASE, 0.6, 1.0
    durations.without_reducer = durations.longest_without_reducer = 0.1
    if streams:
        without_tables()
    os.environ["REDISACC_RUN_ID"] = run_id
    try:
        if role == "reducer":
            redisacc.Reducer(NAME, redis=url).run()
        elif role == "chief":
            chief(url, workers, until, partitions, optimizer, updates)
        else:
            worker(url, number, streams)
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
