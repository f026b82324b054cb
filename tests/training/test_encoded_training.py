"""Trainings whose parameters or gradients travel encoded: a restart gives the same as an undisturbed run."""

import ml_dtypes
import numpy as np
import pytest

import redisacc

pytestmark = pytest.mark.servers("valkey")

START = {"w": np.linspace(-1, 1, 600, dtype=np.float32), "n": np.zeros(2)}


def rounded(values):
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def gradient(number, step, weights):
    # Small enough that rounded weights would not move.
    return {"w": 1e-4 * weights["w"] + np.float32(1e-5), "n": np.ones(2)}


def move(chief, taken):
    moved = {"w": chief.parameters["w"] - taken.gradient["w"], "n": chief.parameters["n"] + taken.gradient["n"]}
    chief.publish(moved, state={"step": np.array(chief.step + 1)})


@pytest.mark.parametrize(
    "encodings", [("bfloat16",) * 3, ("bfloat16", "float32", "bfloat16"), (None, "bfloat16", None)]
)
def test_a_chief_continues_with_its_own_parameters(training, encodings):
    working = training.work(gradient=gradient)
    weights = START["w"]
    for number, encoding in enumerate(encodings):
        chief = training.chief(START, encoding=encoding)
        assert (chief.step, chief.state) == (2 * number, {"step": 2 * number} if number else None)
        np.testing.assert_array_equal(chief.parameters["w"], weights)
        for taken in chief.rounds():
            # The gradient of the first step may have been computed from what the chief before published.
            seen = encodings[number - 1] if number and chief.step == 2 * number else encoding
            parameters = {"w": rounded(weights) if seen == "bfloat16" else weights}
            weights = weights - gradient(0, chief.step, parameters)["w"]
            move(chief, taken)
            np.testing.assert_array_equal(chief.parameters["w"], weights)
            if chief.step == 2 * number + 2:
                break
        if number == 2:
            chief.finish()
        chief.close()
    worker, steps = working.result()
    # Step 6 is never taken: the worker may begin with it before the training is finished, or not.
    assert (worker, steps[:6]) == (0, list(range(6)))
    assert steps[6:] in ([], [6])
    assert not np.array_equal(weights, rounded(weights))


def test_parameters_that_the_server_has_lost_are_published_again(training, client):
    chief = training.chief(START, encoding="bfloat16")
    before = {key: client.dump(key) for key in client.keys("redisacc:{train}:parameters*")}
    working = training.work(gradient=gradient)
    for taken in chief.rounds():
        move(chief, taken)
        if chief.step == 2:
            weights = chief.parameters["w"]
            # As if the server had been restarted from older data.
            # The record comes last, so that the worker finds parameters at every moment.
            for key in sorted(before, key=len, reverse=True):
                client.restore(key, 0, before[key], replace=True)
            client.delete(*set(client.keys("redisacc:{train}:parameters*")) - before.keys())
        if chief.step == 3:
            break
    assert chief.parameters["w"].tolist() == (weights - gradient(0, 2, {"w": rounded(weights)})["w"]).tolist()
    chief.finish()
    chief.close()
    working.result()
    assert training.chief(START).parameters["w"].tolist() == chief.parameters["w"].tolist()


@pytest.mark.parametrize("exact", [[START["w"][:9]], [START["w"]] * 2, [], START["w"], [{"w": START["w"]}]])
def test_a_state_that_does_not_fit(training, client, exact):
    training.chief(START).close()
    with redisacc.Parameters("train", redis=client, encoding="bfloat16") as parameters:
        parameters.publish(START, 1, state={"redisacc:float32": exact, "state": np.zeros(1)})
    with pytest.raises(redisacc.CorruptDataError, match="'train': the state of the parameters has 'redisacc:float32'"):
        training.chief(START)


@pytest.mark.parametrize("sparse", [False, True])
def test_what_a_worker_sends_of_a_single_array(training, sparse):
    chief = training.chief(np.zeros((50, 100), np.float32), sparse=["."] * sparse)
    worker = training.worker(encoding="int8")
    next(worker.steps())
    rows = np.random.default_rng(1).standard_normal((50, 100)).astype(np.float32)
    sent = [worker.as_encoded(rows)] if not sparse else []
    if sparse:
        slices = redisacc.IndexedSlices(rows, np.arange(50))
        sent = [worker.as_encoded(given).values for given in (slices, (np.arange(50), rows))]
        rows = slices
    worker.apply(rows)
    taken = next(rounds := chief.rounds())
    for found in sent:
        np.testing.assert_array_equal(found, taken.gradient.values if sparse else taken.gradient)
    rounds.close()


@pytest.mark.parametrize("state", [None, np.arange(3)])
def test_parameters_of_which_nothing_is_rounded(training, state):
    training.chief(np.arange(5), encoding="bfloat16", state=state).close()
    chief = training.chief(np.zeros(5, int), encoding="bfloat16")
    assert chief.parameters.tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(chief.state, state)
