"""Steps that a worker skips: by itself, with weight 0, or because its gradient has NaN. Nobody waits for it."""

import numpy as np
import pytest

import redisacc

pytestmark = pytest.mark.servers("valkey")

SIZES = {"tiny": 3, "in parts": 200_000}
NOTHING = {"skip": lambda worker, _: worker.skip(), "weight 0": lambda worker, wrong: worker.apply(wrong, weight=0)}


def work(training, number, gradient, **options):
    """Runs the loop of a worker. ``gradient`` gets the worker, the step and the weights, and applies something."""
    with training.worker(number, **options) as worker:
        return [gradient(worker, step, weights) for step, weights in worker.steps()]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("order", ["worker", "arrival"])
@pytest.mark.parametrize("how", NOTHING)
def test_the_mean_is_that_of_the_others(training, background, size, order, how):
    model = {"w": np.zeros(SIZES[size], np.float32)}
    chief = training.chief(model, workers=3, order=order, reduction_type="MEAN")
    values = [np.float32(0.1), np.float32(0.7), np.float32(np.nan)]

    def gradient(worker, step, weights):
        given = {"w": np.full_like(weights["w"], values[worker.number])}
        return NOTHING[how](worker, given) if worker.number == 2 else worker.apply(given, weight=3)

    crew = [background(work, training, number, gradient) for number in range(3)]
    for taken in chief.rounds(until=2):
        assert (taken.gradient["w"] == (values[0] * 3 + values[1] * 3) / np.float32(6)).all()
        chief.publish(model)
    assert [one.outcome for one in crew[2].result(30)] == ["skipped", "skipped"]


@pytest.mark.parametrize("kind", ["dense", "sparse", "rows of a tree", "integers"])
def test_each_kind_of_gradient(training, background, kind):
    model = np.zeros((4, 2), np.int64 if kind == "integers" else np.float32)
    options = {} if kind in ("dense", "integers") else {"sparse": ["."]}
    if kind == "rows of a tree":
        model, options = {"w": model}, {"sparse": ["w"]}
    chief = training.chief(model, workers=2, **options)

    def gradient(worker, step, weights):
        if worker.number:
            return worker.skip()
        ones = np.ones_like(np.asarray(weights["w"] if kind == "rows of a tree" else weights))
        rows = redisacc.IndexedSlices.from_dense(ones) if options else ones
        return worker.apply({"w": rows} if kind == "rows of a tree" else rows)

    crew = [background(work, training, number, gradient) for number in range(2)]
    for taken in chief.rounds(until=1):
        found = taken.gradient["w"] if kind == "rows of a tree" else taken.gradient
        assert (np.asarray(found.values if options else found) == 1).all()
        assert taken.num_accumulated == 2
        chief.publish(model)
    for one in crew:
        one.result(30)


def test_a_mean_of_integers_has_no_place_for_it(training, background):
    chief = training.chief(workers=1, reduction_type="MEAN")
    worker = training.worker()
    next(worker.steps())
    with pytest.raises(redisacc.InvalidArgumentError, match=r'a mean of integers.*: use reduction_type="SUM"'):
        worker.skip()
    chief.close()


@pytest.mark.parametrize("reducer", [False, True], ids=["alone", "reducer"])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_if_all_skip_weights_and_state_stay_and_the_step_counts(training, background, reducing, reducer, clip_norm):
    """As if the step had not been: a training without it ends with the same bits."""

    def run(skipped, until):
        rate = {"lr": "rate"} if clip_norm is None else {"lr": 0.1}
        optimizer = redisacc.optim.AdamW(weight_decay=0.1, clip_norm=clip_norm, ema=0.9, **rate)
        model = {"rows": np.ones((3, 2), np.float32), "w": np.ones(200_000, np.float32)}
        chief = training.chief(model, workers=2, optimizer=optimizer, reduction_type="MEAN", sparse=["rows"])
        if reducer:
            reducing(wanted=2)

        def gradient(worker, step, weights):
            if step == skipped:
                return worker.skip()
            rows = redisacc.IndexedSlices([[1.0, 2.0]], [worker.number])
            given = {"rows": rows, "w": weights["w"] * np.float32(0.5 + worker.number)}
            return worker.apply(given, weight=2, metrics={"rate": 0.1})

        crew = [background(work, training, number, gradient) for number in range(2)]
        for _ in chief.updates(until=until):
            pass
        for one in crew:
            one.result(30)
        (step, weights), (_, state) = chief.latest(), chief.latest_state()
        assert step == until
        assert int(state["updates"]) == 3
        chief.delete()
        chief.close()
        return weights["w"].tobytes(), weights["rows"].tobytes(), state["exp_avg"]["w"].tobytes()

    assert run(1, 4) == run(None, 3)


@pytest.mark.parametrize("finite", [True, "skip"])
def test_a_nan_neither_ends_a_run_nor_hangs_it(real_client, background, caplog, finite):
    """One of two processes has NaN in step 1; with ``finite=True``, its program continues its loop."""

    def run(number):
        outcomes = []
        options = {} if finite == "skip" else {"accumulator": {"finite": True}}
        with redisacc.Training(
            "train",
            {"w": np.zeros(2, np.float32)},
            optimizer=redisacc.optim.SGD(1.0),
            workers=2,
            number=number,
            redis=real_client,
            **options,
        ) as training:
            for step, weights in training.steps(until=3):
                value = np.nan if (step, number) == (1, 1) else -1.0 - number
                try:
                    outcomes.append(training.apply({"w": np.full_like(weights["w"], value)}).outcome)
                except redisacc.NotFiniteError:
                    continue
            return outcomes, training.latest()[1]["w"].tolist()

    crew = [background(run, number) for number in range(2)]
    found = [one.result(30) for one in crew]
    skipped = ["applied", "skipped", "applied"] if finite == "skip" else ["applied", "applied"]
    # 1.5 and 1.5 of both, and 1 of the first alone.
    assert found == [(["applied"] * 3, [4.0, 4.0]), (skipped, [4.0, 4.0])]
    warned = [record.getMessage() for record in caplog.records if "because of NaN" in record.getMessage()]
    assert len(warned) == (finite == "skip")
    caplog.clear()


def test_many_are_mentioned_ever_less_often(training, background, caplog):
    chief = training.chief({"w": np.zeros(2, np.float32)}, workers=1)
    one = background(work, training, 0, lambda worker, step, weights: worker.apply({"w": weights["w"] + np.nan}))
    # Nothing is left of any step.
    assert list(chief.rounds(until=9)) == []
    assert chief.step == 9
    one.result(30)
    assert [text.getMessage().split(";")[1].split()[0] for text in caplog.records] == ["1", "2", "4", "8"]
    caplog.clear()


def test_an_upload_of_nan_is_skipped(training, background, caplog):
    chief = training.chief({"w": np.zeros(200_000, np.float32)}, workers=1)

    def gradient(worker, step, weights):
        with worker.begin() as upload:
            upload.put("w", np.full_like(weights["w"], 1.0 if step else np.nan))
            return upload.commit().outcome

    one = background(work, training, 0, gradient)
    for taken in chief.rounds(until=2):
        assert taken.global_step == 1
        chief.publish({"w": taken.gradient["w"]})
    assert one.result(30) == ["skipped", "applied"]
    caplog.clear()


@pytest.mark.parametrize("how", ["skip", "nan", "refused", "some"])
def test_local_steps(real_client, background, caplog, how):
    """A worker skips all steps of a version, or some: the others do not wait, and the mean is theirs."""

    def run(number):
        inner = redisacc.optim.SGD(1.0)
        steps = redisacc.LocalSteps(inner, every=2, outer=redisacc.optim.SGD(1.0))
        with redisacc.Training(
            "train",
            {"w": np.zeros(2, np.float32)},
            optimizer=steps,
            workers=2,
            number=number,
            redis=real_client,
            accumulator={"finite": True if how == "refused" else "skip"},
        ) as training:
            for step, weights in training.steps(until=4):
                ones = np.ones_like(weights["w"])
                if number == 0 or (how == "some" and step % 2):
                    training.apply({"w": -ones})
                elif how in ("skip", "some"):
                    training.skip()
                else:
                    try:
                        training.apply({"w": ones * np.nan})
                    except redisacc.NotFiniteError:
                        continue
            return training.latest()[1]["w"].tolist()

    crew = [background(run, number) for number in range(2)]
    expected = 2 * (1.5 if how == "some" else 2.0)
    assert [one.result(30) for one in crew] == [[expected, expected]] * 2
    caplog.clear()


@pytest.mark.parametrize("wrong", [None, 1, "no", "Skip"])
def test_finite_is_checked(real_client, wrong):
    with pytest.raises(redisacc.InvalidArgumentError, match="finite must be True, False or 'skip'"):
        redisacc.Worker("train", redis=real_client, finite=wrong)
