"""Trainings whose parameters and gradients lie in partitions."""

import logging

import numpy as np
import pytest
from support.leaks import remaining

import redisacc

# So many elements are in a part in each partition.
SIZE = 20_000


def partitions_of(training):
    return [training.client.hget(f"redisacc:{{train}}{what}", "partitions") for what in ("", ":parameters")]


@pytest.mark.servers("valkey")
def test_a_chief_says_it_once_and_its_successor_adopts_it(training):
    options = {"limits": redisacc.Limits(in_place=0), "state": [np.arange(3)]}
    first = training.chief({"w": np.zeros(SIZE, np.int64)}, partitions=3, **options)
    assert partitions_of(training) == [b"0,1,2", b"0,1,2"]
    worker = training.work(gradient=lambda number, step, parameters: {"w": np.full(SIZE, step + 1)})
    training.lead(first, 3)
    first.close()
    assert worker.result(30)[1] == [0, 1, 2]
    for other in (1, 2):
        with pytest.raises(redisacc.InvalidArgumentError, match="number of partitions is 3, not"):
            training.chief({"w": np.zeros(SIZE, np.int64)}, partitions=other, **options)
    for partitions, until in ((None, 5), ("auto", 6), (3, 7)):
        chief = training.chief({"w": np.zeros(SIZE, np.int64)}, partitions=partitions, **options)
        worker = training.work(gradient=lambda number, step, parameters: {"w": np.full(SIZE, step + 1)})
        training.lead(chief, until)
        chief.close()
        worker.result(30)
    assert chief.parameters["w"].tolist() == [sum(range(8))] * SIZE
    chief = training.chief({"w": np.zeros(SIZE, np.int64)}, **options)
    chief.delete()
    assert remaining(training.client) == []


# What a node has lost. Workers wait for parameters, and so does one that joins only then. Without a gradient, neither
# this chief nor the next one could continue.
LOST = {
    "blob": "a node has lost a part of the parameters of step 0; publishing them again",
    "part": "Beginning step 0 again: its workers apply their gradients again",
}


@pytest.mark.servers("valkey")
@pytest.mark.parametrize("kind", LOST)
def test_what_a_node_has_lost_is_published_or_applied_again(training, until, caplog, kind):
    chief = training.chief({"w": np.zeros(SIZE, np.int64)}, workers=2, partitions=3, limits=redisacc.Limits(in_place=0))
    ones = {"w": np.ones(SIZE, np.int64)}
    first = training.work(gradient=lambda *_: ones)
    until(lambda: int(training.record[b"num_accumulated"]) == 1)
    lost = sorted(training.client.scan_iter(f"redisacc:{{train/*}}:partition:{kind}:*"))[1]
    training.client.delete(lost)
    with caplog.at_level(logging.WARNING, "redisacc"):
        second = training.work(gradient=lambda *_: ones)
        if kind == "blob":
            until(lambda: "waiting for the chief" in caplog.text)
        training.lead(chief, 3)
    assert lost.decode() in caplog.text
    assert LOST[kind] in caplog.text
    assert first.result(30)[1] == second.result(30)[1] == [0, 1, 2]
    assert chief.parameters["w"].tolist() == [6] * SIZE


OPTIMIZERS = {"rounds": None, "updates": redisacc.optim.SGD(0.5, momentum=0.5)}


class Interrupted:
    """A training of one worker whose chief has died at step 2, and a node of which has lost a part of that step."""

    def __init__(self, training, until, durations, optimizer, **options):
        durations(gathering=0.5)
        self._training, self._until = training, until
        self._options = {"optimizer": optimizer, "workers": 1, "partitions": 3, **options}
        self.begun = []
        self.worker = training.worker()
        training.work(self.worker, self._gradient)
        chief = self.chief()
        self.lead(chief, 2)
        until(lambda: 2 in self.begun)
        self.weights = chief.latest()[1]["w"] if optimizer else chief.parameters["w"]
        chief.close()
        part = sorted(training.client.scan_iter("redisacc:{train/*}:partition:blob:*"))[-1]
        slot = part[: part.index(b"}") + 1].decode()
        assert training.client.delete(*training.client.scan_iter(f"{slot}:*"))

    def _gradient(self, _, step, parameters):
        self.begun.append(step)
        return {"w": parameters["w"] + np.float32(step)}

    def chief(self, **more):
        return self._training.chief({"w": np.ones(SIZE, np.float32)}, **self._options, **more)

    def lead(self, chief, last):
        """Leads until a step, and does not finish the training."""
        if self._options["optimizer"] is None:
            for taken in chief.rounds():
                chief.publish({"w": chief.parameters["w"] - taken.gradient["w"] / 4})
                if chief.step == last:
                    return
        for step in chief.updates():
            if step == last:
                return


@pytest.mark.usefixtures("time_runs")
@pytest.mark.servers("valkey")
@pytest.mark.parametrize("loop", OPTIMIZERS)
def test_what_a_node_has_lost_and_no_process_has_comes_back_from_a_worker(training, until, durations, caplog, loop):
    one = Interrupted(training, until, durations, OPTIMIZERS[loop])
    chief = one.chief()
    one.lead(chief, 4)
    assert caplog.text.count("Continuing from what workers have, or from a checkpoint") == 1
    assert "continuing at step 2 with the parameters of a living worker" in caplog.text
    until(lambda: 4 in one.begun)
    # No step has been made twice, and none was left out.
    assert sorted(set(one.begun)) == [0, 1, 2, 3, 4]
    weights = one.weights
    factor, change = (0.5, 0) if OPTIMIZERS[loop] else (0.25, 0)
    for step in (2, 3):
        # The state of the optimizer has begun again at step 2.
        change = change * np.float32(0.5 if OPTIMIZERS[loop] else 0) + weights + np.float32(step)
        weights = weights - np.float32(factor) * change
    assert chief.latest()[1]["w"].tolist() == weights.tolist()
    chief.delete()
    assert remaining(training.client) == []


@pytest.mark.servers("valkey")
@pytest.mark.parametrize("loop", OPTIMIZERS)
def test_what_nobody_has_is_not_given_up(training, until, durations, loop):
    one = Interrupted(training, until, durations, OPTIMIZERS[loop])
    one.worker.close()
    with pytest.raises(redisacc.DataLossError):
        one.lead(one.chief(), 3)
    # Whoever finds the part may still continue.
    assert training.client.hget("redisacc:{train}:parameters", "step") == b"2"


@pytest.mark.usefixtures("time_runs")
@pytest.mark.servers("valkey")
@pytest.mark.parametrize("loop", OPTIMIZERS)
def test_what_a_node_has_lost_comes_back_from_a_checkpoint(training, until, durations, tmp_path, caplog, loop):
    one = Interrupted(training, until, durations, OPTIMIZERS[loop], checkpoint=tmp_path, checkpoint_every=1)
    chief = one.chief()
    one.lead(chief, 3)
    assert "continuing from the checkpoint of step 2" in caplog.text
    assert chief.latest()[0] == 3


@pytest.mark.usefixtures("time_runs")
@pytest.mark.servers("valkey")
def test_a_chief_dies_after_it_has_given_up_what_a_node_has_lost(training, until, durations, proxy, caplog):
    """The next one does not begin a new training."""
    one = Interrupted(training, until, durations, OPTIMIZERS["updates"])
    # The chief that dies makes several calls in vain, one after the other.
    durations(call=2.0, release=2.0)

    def die():
        proxy.refuses = True
        proxy.cut_all()

    # When it has removed what is left, too, it asks the workers.
    proxy.after("give_up", lambda: proxy.before("claim", die))
    with pytest.raises(redisacc.ServerUnavailableError), one.chief(redis=proxy.url, patience=0) as chief:
        one.lead(chief, 3)
    assert training.client.hget("redisacc:{train}:parameters", "step") is None
    chief = one.chief()
    one.lead(chief, 3)
    assert "continuing at step 2 with the parameters of a living worker" in caplog.text


@pytest.mark.usefixtures("time_runs")
@pytest.mark.servers("valkey")
def test_what_was_replaced_is_not_given_up(training, until, durations, proxy):
    one = Interrupted(training, until, durations, OPTIMIZERS["updates"])

    def publish():
        with redisacc.Parameters("train", redis=training.client) as parameters:
            parameters.publish({"w": one.weights}, 2)

    proxy.before("give_up", publish)
    one.lead(one.chief(redis=proxy.url), 3)
    assert training.client.hget("redisacc:{train}:parameters", "step") == b"3"
