"""A training with an optimizer gives the bits of a plain local loop, whoever computes its parts."""

import contextlib
import functools
from collections import Counter
from itertools import product

import numpy as np
import pytest
from support.leaks import leftovers
from support.local_updates import LocalTraining, differences, gradient_of, squares_by_part, state_of
from support.proxy import Weather
from support.selection import thorough

import redisacc
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


SPARSE = ("body/table", "head/b")


def with_tables(elements, *, rows=40):
    """Returns weights of about so many dense elements, a table before them, and one after some of them."""
    random = np.random.default_rng(elements)
    return {
        "body/table": random.standard_normal((rows, 3)).astype(np.float32),
        "body/w": random.standard_normal((elements // 2, 2)).astype(np.float32),
        "head/b": random.standard_normal((rows // 2, 2, 2)),
        "scale": np.ones(3),
        "tail": np.ones(elements // 4, np.float32),
    }


MODELS = {"dense": (model_of, ()), "tables": (with_tables, SPARSE)}
SIZES = {"inline": 400, "a part": 30_000, "several parts": 300_000}


class Updated:
    """A training with an optimizer, and the same one in memory.

    Attributes:
        proxy: what the chief reaches the server through.
        moved: how many bytes of arrays it has sent and received in each update.
    """

    def __init__(
        self,
        training,
        background,
        proxy,
        durations,
        optimizer,
        parameters,
        *,
        weights=(1.0,) * CREW,
        encodings=None,
        **options,
    ):
        self.training, self.background, self.proxy, self.durations = training, background, proxy, durations
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
        self.moved = []

    def open(self, optimizer, **options):
        given = {"redis": self.proxy.url, **self.options, **options}
        # A reducer that was late for the first update does not make takes do without it.
        self.durations(without_reducer=0.0)
        self.chief = self.training.chief(self.parameters, optimizer=optimizer, **given)
        return self.chief

    @property
    def dense(self):
        """The bytes of the leaves whose gradients are dense."""
        sparse = self.options.get("sparse", ())
        return sum(values.nbytes for path, values in self.parameters.items() if path not in sparse)

    def work(self, before=lambda number, step: None, after=lambda number, step: None, where=None):
        """Begins to work. ``before`` and ``after`` are called around each apply, with the worker's number and step."""
        where = where or self.training.client

        def one(number):
            with self.training.worker(number, encoding=self.encodings[number], redis=where) as worker:
                for step, found in worker.steps():
                    before(number, step)
                    worker.apply(self.gradient(number, step, found), weight=self.weights[number])
                    after(number, step)

        self.crew = [self.background(one, number) for number in range(len(self.weights))]

    def lead(self, until, seen=lambda step: None):
        """Leads up to a step. ``seen`` is called after each update."""
        self.proxy.listen_anew()
        for step in self.chief.updates(until=until):
            self.moved.append(sum(size for sizes in self.proxy.lengths.values() for size in sizes if size > 10_000))
            seen(step)
            self.proxy.listen_anew()

    def run(self, until, seen=lambda step: None, **how):
        """Trains up to a step, and compares."""
        self.work(**how)
        self.lead(until, seen)
        self.join()
        self.check(until)

    def patient(self, seen=lambda step: None):
        """Lets the chief wait for reducers from the second update on, however slow this machine is.

        Workers do not announce their first gradients, so a reducer may come too late for the first update.
        """
        self.durations(abandoned=0.0)

        def waiting(step):
            self.durations(least_patience=20.0, longest_patience=20.0)
            seen(step)

        return waiting

    def run_with_reducers(self, until, seen=lambda step: None, **how):
        """Trains up to a step, and compares. From the second update on, the chief moves no arrays."""
        self.run(until, self.patient(seen), **how)
        assert not any(self.moved[1:])

    def join(self):
        for one in self.crew:
            one.result(60)

    def check(self, step):
        self.local.train(step, squares_by_part(self.chief._weights._known.model))
        found, parameters = self.chief.latest()
        assert found == step
        exact = parameters
        if self.options.get("encoding") == "bfloat16":
            sent = self.local.sent
            assert {path: v.tobytes() for path, v in parameters.items()} == {p: v.tobytes() for p, v in sent.items()}
            with redisacc.Parameters("train", redis=self.training.client) as published:
                kept = iter(published.latest_state()[1]["redisacc:float32"])
            exact = {path: next(kept) if v.dtype == np.float32 else v for path, v in parameters.items()}
        assert differences(self.local, exact, state_of(self.chief)) == []


@pytest.fixture
def updated(training, background, proxy, durations):
    made = []

    def make(*args, **options):
        made.append(Updated(training, background, proxy, durations, *args, **options))
        return made[-1]

    yield make
    for one in made:
        with contextlib.suppress(redisacc.NotFoundError, redisacc.CancelledError):
            one.chief.delete()


def run(updated, reducing, kind, name, size, *, reduced, **options):
    """Trains four steps, with a reducer or without. The chief fetches rows of tables, and no dense parts."""
    make, sparse = MODELS[kind]
    one = updated(OPTIMIZERS[name], make(SIZES[size]), sparse=sparse, **options)
    if reduced:
        reducing(wanted=len(one.weights))
    (one.run_with_reducers if reduced else one.run)(4)


@pytest.mark.slow(keep="dense-adamw ema-several|(nesterov|amsgrad)-inline")
@pytest.mark.parametrize(
    ("name", "size", "partitions", "reduced"),
    thorough(
        [*product(OPTIMIZERS, SIZES, [None], [False]), *product(OPTIMIZERS, ["several parts"], [None, 3], [True])],
        usual=[
            *product(OPTIMIZERS, ["inline"], [None], [False]),
            ("adamw ema", "several parts", None, False),
            ("adamw ema", "several parts", None, True),
            ("sgd nesterov", "several parts", 3, True),
            ("rmsprop centered", "several parts", 3, True),
        ],
    ),
)
@pytest.mark.parametrize("kind", MODELS)
def test_every_optimizer(updated, reducing, kind, name, size, partitions, reduced):
    run(updated, reducing, kind, name, size, reduced=reduced, partitions=partitions)


@pytest.mark.slow(keep="3-bfloat16")
@pytest.mark.parametrize("encoding", [None, "bfloat16"])
@pytest.mark.parametrize("partitions", [None, 3])
def test_workers_fetch_parts_before_they_are_published(updated, reducing, ahead, until, partitions, encoding):
    one = updated(OPTIMIZERS["adamw"], model_of(SIZES["several parts"]), partitions=partitions, encoding=encoding)
    halves = {np.dtype(np.float32): 2} if encoding else {}
    version = sum(values.nbytes // halves.get(values.dtype, 1) for values in one.parameters.values())

    def wait_for_workers(step):
        # They have read all versions so far, the first of which has number 0, and fetch the next one already. From the
        # second step on, all workers listen. The last version is not read.
        if 2 <= step < 5:
            least = CREW * version * (step + 2)
            one.proxy.before("publish", lambda: until(lambda: sum(ahead.lengths["reply"]) >= least))

    reducing()
    one.run_with_reducers(5, wait_for_workers, where=ahead.url)


@pytest.mark.slow(keep="valkey-3")
@pytest.mark.forges
@pytest.mark.parametrize("partitions", [None, 3])
def test_forged_parts_of_the_next_version_do_no_harm(updated, reducing, ahead, until, partitions):
    """Workers fetch them, and use them for no version, neither this one nor the next."""
    one = updated(OPTIMIZERS["adamw"], model_of(SIZES["several parts"]), partitions=partitions)
    client, gradient, forged = one.training.client, one.gradient, Counter()

    def forge(step):
        ahead.listen_anew()
        stored = "redisacc:{train/*}:partition:blob" if partitions else "redisacc:{train}:parameters:object"
        for key in client.keys(f"{stored}:*-flat:*"):
            place, sort, _, number = key.decode().rsplit(":", 3)
            length = client.strlen(key) - (number == "1")
            client.set(f"{place}:{sort}:f0-{step}-flat:{number}", bytes(length), px=20_000)
            for text in (
                "",
                "x",
                f"f0-{step} -1",
                f"f0-{step} 999999",
                "* 0",
                "a-1:b 0",
                f"f1-{step} {number}",
                f"f0-{step} {number}",
            ):
                forged[text] += client.publish(f"{place}:updated", text)

    def compute(number, step, found):
        if number == 0 and step in (2, 3):
            before = {path: values.copy() for path, values in found.items()}
            forge(step)
            until(lambda: sum(ahead.lengths["reply"]) > one.dense / 4)
            assert differences_of(before, found) == []
        return gradient(number, step, found)

    one.gradient = compute
    reducing()
    one.run(5, where=ahead.url)
    assert min(forged.values()) >= CREW


def differences_of(before, after):
    return [path for path, values in before.items() if values.tobytes() != after[path].tobytes()]


@pytest.mark.slow(keep=r"tables.*weights.*(bfloat16|index).*True-3|dense.*SUM.*weights.*False-None")
@pytest.mark.parametrize(
    ("reduced", "partitions"),
    thorough(list(product([False, True], [None, 3])), usual=[(False, None), (True, 3)]),
)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *product(
            MODELS,
            [
                {"encoding": "bfloat16"},
                {"weights": WEIGHTS, "encoding": "bfloat16", "encodings": ("bfloat16",) * 3},
                {"reduction_type": "SUM", "weights": WEIGHTS},
            ],
        ),
        ("dense", {"encodings": ("bfloat16", None, "bfloat16")}),
        ("dense", {"weights": WEIGHTS}),
        ("dense", {"reduction_type": "SUM"}),
        ("tables", {"mean": redisacc.Mean(rows="index")}),
        ("tables", {"mean": redisacc.Mean(rows="index"), "weights": WEIGHTS}),
    ],
    ids=str,
)
def test_encodings_weights_and_sums(updated, reducing, kind, options, partitions, reduced):
    name = {"dense": "adamw", "tables": "adamw ema"}[kind]
    run(updated, reducing, kind, name, "several parts", reduced=reduced, partitions=partitions, **options)


@pytest.mark.parametrize("partitions", [None, 3])
@pytest.mark.parametrize(
    ("crew", "encoding"), thorough([(1, None), (1, "bfloat16"), (2, "bfloat16")], usual=[(1, None)])
)
def test_a_reducer_updates_although_the_gradients_have_no_more_bytes_than_their_sum(
    updated, reducing, partitions, crew, encoding
):
    options = {"weights": (1.0,) * crew, "encodings": (encoding,) * crew, "encoding": encoding}
    run(updated, reducing, "dense", "adamw", "several parts", reduced=True, partitions=partitions, **options)


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

    one.run(3, before=in_reverse, after=count)


@pytest.mark.slow(keep=r"3-adam\]")
@pytest.mark.parametrize("name", ["adam", "adamw ema"])
@pytest.mark.parametrize("partitions", [None, 3])
def test_updaters_that_are_late_and_in_time(updated, reducing, late, name, partitions):
    """They may read the record after the order, say. The chief waits for them."""
    one = updated(OPTIMIZERS[name], model_of(SIZES["several parts"]), partitions=partitions)
    reducing(redis=late.url)
    one.run(5, one.patient(lambda step: late.weather(Weather(delay=0.2))))
    assert 0 in one.moved[1:]


@pytest.mark.slow(keep="valkey-3")
@pytest.mark.parametrize("partitions", [None, 3])
def test_two_reducers_that_believe_to_hold_the_lease(updated, reducing, partitions):
    one = updated(OPTIMIZERS["adamw ema"], model_of(SIZES["several parts"]), partitions=partitions)
    reducing(2)

    def lose_leases(_):
        for lease in one.training.client.keys("redisacc:{train}:reducer*"):
            one.training.client.delete(lease)

    one.run(6, lose_leases)


@pytest.mark.slow(keep="3-4")
@pytest.mark.parametrize("written_at", [3, 4])
@pytest.mark.parametrize("partitions", [None, 3])
def test_writes_that_arrive_late(updated, reducing, late, durations, until, partitions, written_at):
    """They are of the last version, or the one before, and arrive when both are there. They change nothing."""
    durations(least_patience=0.05, longest_patience=0.05)
    one = updated(OPTIMIZERS["adamw"], model_of(SIZES["several parts"]), partitions=partitions)
    reducing(redis=late.url)
    arrived = []

    def hold(step):
        if step == written_at:
            late.before("SET", lambda: until(lambda: len(one.moved) == 5))
            late.after("SET", lambda: arrived.append(step))

    one.run(5, hold)
    # The chief has made the parts itself.
    assert one.moved[written_at] > one.dense
    until(lambda: arrived)
    client = one.training.client
    version = client.hget("redisacc:{train}:parameters", "version").decode()
    assert {client.pttl(key) for key in client.keys(f"redisacc:{{train*:{version}-*")} == {-1}
    assert leftovers(client) == []


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
