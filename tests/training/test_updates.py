"""A training with an optimiser gives the bits of a plain local loop, whoever computes its parts."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from itertools import product

import numpy as np
import pytest
from support.leaks import leftovers
from support.local_updates import LocalTraining, differences, gradient_of, squares_by_part, state_of
from support.selection import thorough

import redisacc
from redisacc._protocol.parameters.ahead import PartsAhead
from redisacc._protocol.scripts.reducers import ReducerScripts
from redisacc._protocol.updates import committer, patience, updater
from redisacc.optim import SGD, Adagrad, Adam, AdamW, Lion, RMSprop

pytestmark = pytest.mark.servers("valkey")

CREW = 3
WEIGHTS = (0.1, 3.7, 1.3)


def schedule(step):
    return 0.01 / (step + 1)


OPTIMIZERS = {
    "sgd": SGD(0.1),
    "sgd decay": SGD(0.1, weight_decay=0.01, maximize=True),
    "sgd momentum": SGD(schedule, momentum=0.9, dampening=0.1),
    "sgd nesterov": SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": Adam(0.01),
    "amsgrad": Adam(schedule, amsgrad=True, weight_decay=0.01),
    "adamw": AdamW(0.01, no_decay=["*/b"], lr_factor={"tail*": 0.5}),
    "adamw ema": AdamW(0.01, ema=0.99, clip_norm=1.0),
    "adagrad": Adagrad(0.1, lr_decay=0.1, initial_accumulator_value=0.5),
    "rmsprop": RMSprop(0.01),
    "rmsprop centered": RMSprop(0.01, centered=True, momentum=0.5),
    "lion": Lion(1e-3),
    "lion ema": Lion(schedule, ema=0.5, clip_norm=100.0),
}


def model_of(elements, *, kind="mixed"):
    """Returns weights of about so many elements."""
    random = np.random.default_rng(elements)
    body = random.standard_normal((elements // 4, 3)).astype(np.float32)
    if kind == "float32":
        return {"head/w": body, "head/b": np.ones(5, np.float32), "tail": np.ones(elements // 4, np.float32)}
    wide = random.standard_normal(elements // 8)
    return {"head/w": body, "head/b": np.ones(5), "tail": wide, "scale": np.float32([1.5]), "empty": np.zeros((0, 2))}


SIZES = {"inline": 400, "a part": 30_000, "several parts": 300_000}


@pytest.fixture
def after_first(monkeypatch):
    """Calls what it is given when the first update is committed.

    Workers do not announce their first gradients, so a reducer may come too late for the first update.
    """
    commit, waiting = committer.Committer.commit, []

    def committed(*args, **options):
        found = commit(*args, **options)
        while waiting:
            waiting.pop()()
        return found

    monkeypatch.setattr(committer.Committer, "commit", committed)
    return waiting.append


class Computed:
    """Who has computed parts.

    Attributes:
        by: the number of parts that the chief and the updaters have computed, for the second update and later ones.
    """

    def __init__(self, monkeypatch, after_first):
        self.by = Counter()
        after_first(self.by.clear)
        elements, write = committer.Committer._elements, updater.PartUpdater._write

        def by_chief(found, of, model, number):
            self.by["chief"] += 1
            return elements(found, of, model, number)

        def by_updater(found, record, part, order, number, sums):
            self.by["updaters"] += 1
            return write(found, record, part, order, number, sums)

        monkeypatch.setattr(committer.Committer, "_elements", by_chief)
        monkeypatch.setattr(updater.PartUpdater, "_write", by_updater)

    def since(self, by):
        self.by, found = Counter(), self.by
        return found[by]


@pytest.fixture
def computed(monkeypatch, after_first):
    return Computed(monkeypatch, after_first)


@pytest.fixture
def patient(monkeypatch, after_first):
    """Lets the chief wait for updaters from the second update on, however slow this machine is."""
    after_first(lambda: monkeypatch.setattr(patience.Patience, "is_over", lambda self, missing: self.pause >= 20))


class Updated:
    """A training with an optimiser, and the same one in memory."""

    def __init__(
        self, training, background, optimizer, parameters, *, weights=(1.0,) * CREW, encodings=None, **options
    ):
        self.training, self.background = training, background
        self.encodings = encodings or (None,) * len(weights)
        self.weights = weights
        self.options = {"workers": len(weights), "reduction_type": "MEAN", **options}
        self.parameters = parameters
        self.gradient = functools.partial(gradient_of, sparse=self.options.get("sparse", ()))
        self.local = LocalTraining(
            optimizer,
            parameters,
            weights=weights,
            encoding=self.options.get("encoding"),
            encodings=encodings,
            reduction_type=self.options["reduction_type"],
            gradient=self.gradient,
            sparse_mean=self.options.get("mean", redisacc.Mean()).rows or "round",
        )
        self.chief = self.open(optimizer)
        self.crew = []

    def open(self, optimizer, **options):
        self.chief = self.training.chief(self.parameters, optimizer=optimizer, **{**self.options, **options})
        return self.chief

    def work(self, before=lambda number, step: None, after=lambda number, step: None):
        """Begins to work. ``before`` and ``after`` are called around each apply, with the worker's number and step."""

        def one(number):
            with self.training.worker(number, encoding=self.encodings[number]) as worker:
                for step, found in worker.steps():
                    before(number, step)
                    worker.apply(self.gradient(number, step, found), weight=self.weights[number])
                    after(number, step)

        self.crew = [self.background(one, number) for number in range(len(self.weights))]

    def lead(self, until):
        for _ in self.chief.updates(until=until):
            pass

    def run(self, until):
        """Trains up to a step, and compares."""
        self.work()
        self.lead(until)
        self.join()
        self.check(until)

    def join(self):
        for one in self.crew:
            one.result(60)

    def check(self, step):
        self.local.train(step, squares_by_part(self.chief._updating._record.model))
        found, parameters = self.chief.latest()
        assert found == step
        exact = parameters
        if self.options.get("encoding") == "bfloat16":
            sent = self.local.sent
            assert {path: v.tobytes() for path, v in parameters.items()} == {p: v.tobytes() for p, v in sent.items()}
            kept = iter(self.chief._parameters.latest_state()[1]["redisacc:float32"])
            exact = {path: next(kept) if v.dtype == np.float32 else v for path, v in parameters.items()}
        assert differences(self.local, exact, state_of(self.chief)) == []


@pytest.fixture
def updated(training, background):
    made = []

    def make(*args, **options):
        made.append(Updated(training, background, *args, **options))
        return made[-1]

    yield make
    for one in made:
        with contextlib.suppress(redisacc.NotFoundError):
            one.chief.delete()


@pytest.mark.slow(keep="several|sgd nesterov|amsgrad")
@pytest.mark.parametrize(
    ("name", "size"),
    thorough(
        list(product(OPTIMIZERS, SIZES)),
        # In one part, except for some.
        usual=[(name, "several parts" if "ema" in name else "inline") for name in OPTIMIZERS],
    ),
)
def test_every_optimizer_without_a_reducer(updated, name, size):
    updated(OPTIMIZERS[name], model_of(SIZES[size])).run(4)


@pytest.mark.slow(keep="ema")
@pytest.mark.parametrize(
    ("name", "partitions"),
    thorough(
        list(product(OPTIMIZERS, [None, 3])), usual=[("sgd nesterov", 3), ("adamw ema", None), ("rmsprop centered", 3)]
    ),
)
def test_every_optimizer_with_a_reducer(updated, reducing, computed, patient, name, partitions):
    one = updated(OPTIMIZERS[name], model_of(SIZES["several parts"]), partitions=partitions)
    reducing()
    one.run(4)
    assert computed.by["chief"] == 0
    assert computed.by["updaters"] >= 4


@pytest.mark.slow(keep="3-bfloat16")
@pytest.mark.parametrize("encoding", [None, "bfloat16"])
@pytest.mark.parametrize("partitions", [None, 3])
def test_workers_fetch_parts_before_they_are_published(
    updated, reducing, computed, patient, until, monkeypatch, partitions, encoding
):
    expect, take, commit = PartsAhead.expect, PartsAhead.take, committer.Committer._commit
    every, taken = set(), []

    def noted(found, *args):
        every.add(found)
        return expect(found, *args)

    def counted(found, blob):
        result = take(found, blob)
        taken.append(0 if result is None else len(result[1]))
        return result

    def late(found, update, *args):
        # From the second step on, all workers listen.
        if update.follows.step > 2:
            number = len(update.model.parts)
            until(lambda: all(len(one._there) == number for one in every))
        return commit(found, update, *args)

    monkeypatch.setattr(PartsAhead, "expect", noted)
    monkeypatch.setattr(PartsAhead, "take", counted)
    monkeypatch.setattr(committer.Committer, "_commit", late)
    one = updated(OPTIMIZERS["adamw"], model_of(SIZES["several parts"]), partitions=partitions, encoding=encoding)
    reducing()
    one.run(5)
    assert len(every) == CREW
    # The last version is not read.
    assert taken.count(max(taken)) >= 2 * CREW
    assert max(taken) == len(one.chief._updating._record.model.parts)


@pytest.mark.slow(keep="weights")
@pytest.mark.parametrize(
    ("reduced", "partitions"),
    thorough(list(product([False, True], [None, 3])), usual=[(False, None), (True, 3)]),
)
@pytest.mark.parametrize(
    "options",
    [
        {"encoding": "bfloat16"},
        {"encodings": ("bfloat16", None, "bfloat16")},
        {"weights": WEIGHTS},
        {"weights": WEIGHTS, "encoding": "bfloat16", "encodings": ("bfloat16",) * 3},
        {"reduction_type": "SUM"},
        {"reduction_type": "SUM", "weights": WEIGHTS},
    ],
    ids=str,
)
def test_encodings_weights_and_sums(updated, reducing, computed, patient, options, partitions, reduced):
    one = updated(OPTIMIZERS["adamw"], model_of(SIZES["several parts"]), partitions=partitions, **options)
    if reduced:
        reducing()
    one.run(4)
    if reduced:
        assert computed.by["chief"] == 0


@pytest.mark.parametrize("partitions", [None, 3])
@pytest.mark.parametrize(
    ("crew", "encoding"), thorough([(1, None), (1, "bfloat16"), (2, "bfloat16")], usual=[(1, None)])
)
def test_a_reducer_updates_although_the_gradients_have_no_more_bytes_than_their_sum(
    updated, reducing, computed, patient, partitions, crew, encoding
):
    weights, encodings = (1.0,) * crew, (encoding,) * crew
    options = {"weights": weights, "encodings": encodings, "encoding": encoding, "partitions": partitions}
    one = updated(OPTIMIZERS["adamw"], model_of(SIZES["several parts"]), **options)
    reducing(wanted=crew)
    one.run(4)
    assert computed.by["chief"] == 0
    assert computed.by["updaters"] >= 4


@pytest.mark.parametrize("size", ["inline", "several parts"])
def test_weights_are_added_in_the_order_of_the_workers(updated, until, size):
    """Their sum differs in its last bit if it is formed in the order of arrival."""
    weights = (0.1, 0.2, 0.3)
    assert (0.1 + 0.2) + 0.3 != (0.3 + 0.2) + 0.1
    one = updated(SGD(0.1, momentum=0.9), model_of(SIZES[size]), weights=weights)
    applied = Counter()

    def in_reverse(number, step):
        until(lambda: applied[step] == CREW - 1 - number)

    def count(number, step):
        applied[step] += 1

    one.work(in_reverse, count)
    one.lead(3)
    one.join()
    one.check(3)


@pytest.mark.slow(keep="3")
@pytest.mark.parametrize("name", ["adam", "adamw ema"])
@pytest.mark.parametrize("partitions", [None, 3])
def test_an_updater_that_reads_the_record_after_the_order(
    updated, reducing, computed, patient, after_first, monkeypatch, name, partitions
):
    """It is late, and still in time, because the chief waits for it."""
    ordered = threading.Event()
    make, update = committer.Committer._make, updater.PartUpdater.update

    def note(*args):
        ordered.set()
        return make(*args)

    def wait(found, *args):
        if OPTIMIZERS[name].clip_norm is None:
            ordered.wait(20)
        found.hear(None)
        return update(found, *args)

    monkeypatch.setattr(committer.Committer, "_make", note)
    monkeypatch.setattr(updater.PartUpdater, "update", wait)
    after_first(ordered.clear)
    one = updated(OPTIMIZERS[name], model_of(SIZES["several parts"]), partitions=partitions)
    reducing()
    one.run(2)
    assert computed.by["chief"] == 0


@pytest.mark.slow(keep="valkey-3")
@pytest.mark.parametrize("partitions", [None, 3])
def test_two_reducers(updated, reducing, computed, patient, partitions):
    one = updated(OPTIMIZERS["adamw ema"], model_of(SIZES["several parts"]), partitions=partitions)
    reducing(2)
    one.run(4)
    # If the lease changes hands in the middle of a round, the chief does without.
    assert computed.by["updaters"] > computed.by["chief"]


@pytest.mark.slow(keep="valkey-3")
@pytest.mark.parametrize("partitions", [None, 3])
def test_two_updaters_at_the_same_time(updated, reducing, computed, patient, monkeypatch, partitions):
    """As if each of two reducers believed that it holds the lease."""
    monkeypatch.setattr(ReducerScripts, "hold_reducer", lambda *_, **__: None)
    one = updated(OPTIMIZERS["adam"], model_of(SIZES["several parts"]), partitions=partitions)
    for _ in range(2):
        reducing(wait=False)
    one.run(4)
    assert computed.by["updaters"] > 0


@pytest.mark.slow(keep="3-after the commit")
@pytest.mark.parametrize("late", ["after the commit", "two steps later"])
@pytest.mark.parametrize("partitions", [None, 3])
def test_writes_that_arrive_late(updated, reducing, computed, monkeypatch, durations, until, partitions, late):
    """They change nothing, and expire."""
    durations(least_patience=0.05, longest_patience=0.05)
    store = updater.PartUpdater._store
    held = []
    monkeypatch.setattr(updater.PartUpdater, "_store", lambda *args: held.append(args))
    one = updated(OPTIMIZERS["adamw"], model_of(SIZES["several parts"]), partitions=partitions)
    reducing()
    one.work()
    for step in one.chief.updates(until=5):
        arriving = held[:] if late == "after the commit" or step == 3 else []
        for args in arriving:
            held.remove(args)
            store(*args)
    one.join()
    until(lambda: held or late == "after the commit")
    for args in held:
        store(*args)
    one.check(5)
    assert computed.by["chief"] > 0
    assert leftovers(one.training.client) == []


@pytest.mark.slow
def test_a_reducer_that_starts_late(updated, reducing, computed, patient):
    one = updated(OPTIMIZERS["adamw ema"], model_of(SIZES["several parts"]))
    one.work()
    steps = one.chief.updates(until=20)
    assert [next(steps) for _ in range(3)] == [1, 2, 3]
    assert computed.since("updaters") == 0
    reducing()
    # It does not add up a round in the middle of which it joins. From some step on, it does everything.
    assert any(computed.since("chief") == 0 for _ in steps)
    assert list(steps)[-1:] in ([20], [])
    one.join()
    one.check(20)


def test_a_training_may_begin_with_the_state_of_another(training):
    """Weights and state that were gathered from one continue in another one, with the same bits."""
    optimizer, weights = Adam(0.01), {"w": np.ones(5, np.float32)}
    with training.chief(weights, optimizer=optimizer, reduction_type="MEAN") as chief:
        worker = training.work(gradient=gradient_of)
        list(chief.updates(until=3))
        worker.result(20)
        found, state = chief.latest()[1], chief.latest_state()[1]
        chief.delete()
    with training.chief(found, optimizer=optimizer, state=state, reduction_type="MEAN") as chief:
        worker = training.work(gradient=lambda number, step, found: gradient_of(number, step + 3, found))
        list(chief.updates(until=2))
        worker.result(20)
        assert chief.latest_state()[1]["updates"] == 5
        assert differences(LocalTraining(optimizer, weights).train(5), chief.latest()[1], state_of(chief)) == []
