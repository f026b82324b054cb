"""What a chief with an optimizer refuses, and what it says when the server has lost what nobody has."""

import numpy as np
import pytest

import redisacc

pytestmark = [pytest.mark.servers("valkey")]

SGD = redisacc.optim.SGD(0.5)
MOMENTUM = redisacc.optim.SGD(0.5, momentum=0.9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "adam"}, r"optimizer must be one of redisacc\.optim, such as .*, or None, not 'str'"),
        (
            {"state": [np.zeros(2)]},
            r"state must be None with an optimizer.*, or a dict of \['updates'\] as latest_state",
        ),
        ({"state": {"updates": 0, "exp_avg": {"w": np.zeros(2)}}}, r"or a dict of \['updates'\]"),
        ({"optimizer": MOMENTUM, "state": {"updates": 1, "momentum_buffer": {"v": 0}}}, "lacks 'w'"),
        ({"mean": redisacc.Mean(missing="skip")}, "missing must be 'zero' with an optimizer, not 'skip'"),
        ({"optimizer": redisacc.optim.AdamW(0.1, no_decay=["*/bias"])}, "must match the path of a leaf"),
    ],
)
def test_what_does_not_go_with_an_optimizer(training, options, message):
    with pytest.raises(redisacc.InvalidArgumentError, match=message):
        training.chief({"w": np.zeros((3, 2), np.float32)}, **{"optimizer": SGD, **options})
    assert not training.client.exists("redisacc:{train}:parameters")


@pytest.mark.parametrize("dtype", ["int64", "float16", "complex64"])
def test_leaves_that_no_optimizer_updates(training, dtype):
    message = f"an optimizer updates leaves of float32 and float64, not {dtype} at 'w'"
    with pytest.raises(redisacc.InvalidArgumentError, match=message):
        training.chief({"w": np.zeros(3, dtype)}, optimizer=SGD)
    # So a program that has been mended finds no accumulator of the wrong kind.
    assert training.record == {}


def test_each_loop_needs_its_chief(training):
    with (
        training.chief({"w": np.zeros(3, np.float32)}, optimizer=SGD) as chief,
        pytest.raises(redisacc.InvalidArgumentError, match="its loop is one over updates"),
    ):
        next(chief.rounds())
    with (
        training.chief({"w": np.zeros(3, np.float32)}) as chief,
        pytest.raises(redisacc.InvalidArgumentError, match=r"updates\(\) needs a chief with an optimizer"),
    ):
        next(chief.updates())


@pytest.mark.parametrize("when", ["before it begins", "while it updates"])
def test_a_loss_that_nobody_can_make_good(training, durations, proxy, when):
    """A chief that was started again has computed none of the parts, and there is no reducer."""
    durations(gathering=0.2)
    weights = {"w": np.ones(3, np.float32)}
    with training.chief(weights, optimizer=SGD, partitions=3) as chief:
        worker = training.worker()
        working = training.work(worker, gradient=lambda _, step, parameters: parameters)
        for _ in chief.updates(until=2):
            pass
        working.result(20)
        worker.close()
    with training.chief(weights, optimizer=SGD, redis=proxy.url) as chief:
        (part,) = training.client.scan_iter("redisacc:{train/*}:partition:blob:*-3-flat:0")
        if when == "before it begins":
            training.client.delete(part)
        else:
            training.gradients(weights, partitions=3, worker="worker 0").apply_grad(weights, 2)
            proxy.before("register_version", lambda: training.client.delete(part))
        with pytest.raises(
            redisacc.DataLossError,
            match=r"the server has lost step 2, and no living process has part 0 of 1 of its weights and state, "
            r"such as .*-flat:0\. A chief can continue from a checkpoint, or with the weights of a living worker",
        ):
            next(chief.updates(until=3))
