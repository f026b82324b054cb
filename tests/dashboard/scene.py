"""Trainings that look like real ones, for the pictures of the dashboard: gradients without a model."""

import contextlib
import math
import random
import threading
import time
from functools import partial

import numpy as np
from click.testing import CliRunner

import redisacc
from redisacc.tools.cli import main


class Threads:
    """The processes of a training, as threads.

    Args:
        url: of the server.
        name: of the training.
        targets: what the threads do until they are over.
    """

    def __init__(self, url, name, targets):
        self._url, self._name = url, name
        self._over = threading.Event()
        self._threads = [threading.Thread(target=target, daemon=True) for target in targets]

    def start(self):
        """Starts all threads."""
        for thread in self._threads:
            thread.start()

    def stop(self):
        """Ends the training, and deletes it."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        CliRunner().invoke(main, ["rm", self._name, "--yes", "--redis", self._url])


class Training(Threads):
    """A chief and workers in threads, whose steps take about as long as is said.

    Args:
        url: of the server.
        name: of the training.
        workers: how many there are.
        elements: of the gradient.
        seconds: how long a worker computes.
        late: a number of steps by which some gradients are late; 0 for none.
        silent: the number of a worker that stops after 20 steps; -1 for none.
    """

    def __init__(
        self,
        url,
        name,
        *,
        workers,
        elements,
        seconds,
        late=0,
        silent=-1,
        required=0,
    ):
        super().__init__(url, name, [self._lead, *(partial(self._work, n) for n in range(workers))])
        self._elements, self._seconds = elements, seconds
        self._late, self._silent, self._workers = late, silent, workers
        self._required = required or workers

    def _open(self, worker):
        options = {"redis": self._url, "worker": worker, "staleness": self._late}
        return redisacc.ConditionalAccumulator("float32", [self._elements], self._name, **options)

    def _lead(self):
        with self._open("chief-0") as acc, redisacc.Parameters(self._name, redis=self._url) as parameters:
            while not self._over.is_set():
                with contextlib.suppress(redisacc.TakeTimeoutError):
                    gradient = acc.take_grad(self._required, timeout=3)
                    time.sleep(self._seconds * 0.12)
                    parameters.publish({"w": gradient}, acc.global_step())

    def _work(self, number):
        draw = random.Random(number)
        gradient = np.ones(self._elements, np.float32)
        with self._open(f"gpu-{number // 4}:{number % 4}") as acc:
            step = steps = 0
            while not self._over.is_set():
                if number == self._silent and steps == 20:
                    self._over.wait(0.1)
                    continue
                time.sleep(self._seconds * draw.uniform(0.7, 1.25))
                behind = draw.choice([0, 0, 0, 1, 1, 2]) if self._late else 0
                if acc.apply_grad(gradient, max(step - min(behind, self._late), 0)):
                    steps += 1
                # A worker whose gradient was too late computes the next one at once.
                before, step = step, acc.global_step()
                while step == before and not self._over.is_set():
                    with contextlib.suppress(redisacc.WaitTimeoutError):
                        step = acc.wait_for_step(step + 1, timeout=0.3)


class Crew(Threads):
    """Processes of a ``redisacc.Training``, in threads, whose loss falls and whose accuracy grows.

    Args:
        url: of the server.
        name: of the training.
        workers: how many there are.
        elements: of the gradient.
        seconds: how long a worker computes.
        until: the last step.
    """

    def __init__(self, url, name, *, workers, elements, seconds, until):
        super().__init__(url, name, [partial(self._work, n) for n in range(workers)])
        self._elements, self._seconds, self._until, self._workers = elements, seconds, until, workers

    def _work(self, number):
        draw = random.Random(number)
        gradient = {"w": np.ones(self._elements, np.float32)}
        options = {"optimizer": redisacc.optim.AdamW(1e-3), "workers": self._workers, "number": number}
        with redisacc.Training(
            self._name, {"w": np.zeros(self._elements, np.float32)}, redis=self._url, **options
        ) as training:
            for step, _ in training.steps(until=self._until):
                if self._over.is_set():
                    training.finish()
                    break
                time.sleep(self._seconds * draw.uniform(0.85, 1.15))
                part = math.exp(-step / 60)
                metrics = {
                    "loss": 0.42 + 6.5 * part + draw.gauss(0, 0.08 + 0.3 * part),
                    "accuracy": 0.76 * (1 - part) + draw.gauss(0, 0.02),
                    "lr": 1e-3 * min(1.0, (step + 1) / 80),
                }
                training.apply(gradient, metrics=metrics)


@contextlib.contextmanager
def trainings(url):
    """Several trainings, of which one waits for a worker that has stopped."""
    found = [
        Crew(url, "resnet-50", workers=8, elements=40_000, seconds=0.1, until=400),
        Training(url, "speech/encoder", workers=4, elements=60_000, seconds=0.35, late=4, required=3),
        Training(url, "recommender-embeddings", workers=6, elements=20_000, seconds=0.4, silent=4),
        Training(url, "policy-net", workers=3, elements=900, seconds=0.12),
        Training(url, "ablation-lr-3e-4", workers=2, elements=5_000, seconds=0.8),
        Training(url, "ablation-lr-1e-3", workers=2, elements=5_000, seconds=0.7),
    ]
    for training in found:
        training.start()
    try:
        yield found
    finally:
        for training in found:
            training.stop()
