"""One process of the chaos: a worker that applies gradients, or a taker. It may be killed or stopped at any moment.

python actor.py ROLE URL NUMBER FIRST JOURNAL STOP SEED

It writes what it is about to do, and each reply, into a journal: a line in one write() each, so a kill loses none.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import redisacc

NAME = "chaos"
# Elements of a row. Every gradient holds row 0 and a row that no other gradient has.
ROW = 4
# Enough for some buffered gradients; beyond that, they are compacted.
BUFFER_LIMIT = 8_000


def opened(redis: Any, worker: str, in_place_limit: int = 10**9) -> redisacc.SparseConditionalAccumulator:
    return redisacc.SparseConditionalAccumulator(
        "float64",
        [None, ROW],
        NAME,
        reduction_type="SUM",
        redis=redis,
        worker=worker,
        in_place_limit=in_place_limit,
        buffer_limit=BUFFER_LIMIT,
    )


def gradient(index: int) -> tuple[list[int], Any]:
    """Returns the gradient of an index, which differs from all others."""
    return [0, index], np.array([[1.0] * ROW, [index + 0.5] * ROW])


def finished(operate: Callable[[], Any]) -> Any:
    """Returns the outcome of an operation, however often the server stops answering."""
    while True:
        try:
            return operate()
        except redisacc.OutcomeUnknownError as error:
            operate = error.retry


class Actor:
    def __init__(self, number: str, url: str, journal: str, stop: str, seed: int) -> None:
        self.me = number
        self._url = url
        self._journal = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._stop = Path(stop)
        self._random = random.Random(seed)

    def note(self, **what: Any) -> None:
        os.write(self._journal, json.dumps(what).encode() + b"\n")

    @property
    def over(self) -> bool:
        return self._stop.exists()

    def open(self, in_place_limit: int = 10**9) -> redisacc.SparseConditionalAccumulator:
        while True:
            try:
                return opened(self._url, self.me, in_place_limit)
            except redisacc.ServerUnavailableError:
                continue

    def apply(self, index: int) -> None:
        # In place, buffered, and in both ways within one round.
        acc = self.open(in_place_limit=self._random.choice([0, 10**9]))
        step = 0
        while not self.over:
            index += 1
            self.note(begin=index)
            try:
                indices, values = gradient(index)
                result = finished(partial(acc.apply_grad, indices, values, local_step=step))
            except (redisacc.ServerUnavailableError, redisacc.AccumulatorFullError) as error:
                self.note(end=index, outcome="refused", why=str(error))
                continue
            self.note(end=index, outcome=result.outcome, step=result.global_step)
            step = result.global_step

    def take(self) -> None:
        acc = self.open()
        while not self.over:
            self._recover(acc)
            required = self._random.choice([1, 4, 9])
            try:
                block = acc.take(required, timeout=self._random.choice([0.5, 2.0, 5.0]))
                taken = block.__enter__()
            except (redisacc.TakeTimeoutError, redisacc.ServerUnavailableError):
                # If the server was silent, the round may have been granted all the same: then it is found above.
                continue
            self._hand_in(taken, block)

    def _recover(self, acc: redisacc.SparseConditionalAccumulator) -> None:
        """Rounds that were granted to this taker, or to a killed one of its name. No other process recovers those."""
        try:
            mine = [one.token for one in acc.info().unacknowledged if one.taker == self.me]
            for token in mine:
                block = acc.recover(token)
                taken = block.__enter__()
                if taken is not None:
                    self._hand_in(taken, block)
                else:
                    block.__exit__(None, None, None)
        except redisacc.ServerUnavailableError:
            return

    def _hand_in(self, taken: Any, block: Any) -> None:
        self.note(round=taken.global_step, **contents(taken))
        if self._random.random() < 0.3:
            # The round is in use: a process that is killed here leaves a round that is handed out again.
            time.sleep(self._random.random())
        finished(lambda: block.__exit__(None, None, None))


def contents(taken: Any) -> dict[str, Any]:
    """A round as it is written down and compared."""
    return {
        "count": taken.num_accumulated,
        "workers": sum(taken.workers.values()),
        "indices": taken.gradient.indices.tolist(),
        "values": taken.gradient.values.tolist(),
    }


def main() -> None:
    role, url, number, first, journal, stop, seed = sys.argv[1:]
    actor = Actor(number, url, journal, stop, int(seed))
    if role == "worker":
        actor.apply(int(first))
    else:
        actor.take()


if __name__ == "__main__":
    main()
