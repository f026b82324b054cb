"""A server that loses data of a training whose arrays only reducers have: they write again what was lost."""

import logging

import numpy as np
import pytest
from support.local_updates import LocalTraining, differences, gradient_of, state_of
from support.selection import thorough

import redisacc

pytestmark = [pytest.mark.servers("valkey"), pytest.mark.usefixtures("time_runs")]

CREW = 2
OPTIMIZER = redisacc.optim.AdamW(0.01)
LAST = 6


class Disturbed:
    """A training with reducers, and what happens to it after a step, of which the chief has computed nothing."""

    def __init__(self, training, background, reducing, proxy, durations):
        self.training, self.background, self.reducing, self.durations = training, background, reducing, durations
        self.proxy = proxy
        self.parameters = {"w": np.linspace(-1, 1, 300_000).astype(np.float32), "b": np.ones(3)}
        self.options = {}
        self.begun = set()

    def begin(self, reducers_at=None, **options):
        self.options = options
        chief = self.chief()
        self.reducers = self.reducing(wanted=CREW, redis=reducers_at)
        self.crew = [self.background(self.work, number) for number in range(CREW)]
        return chief

    def chief(self):
        options = {"workers": CREW, "optimizer": OPTIMIZER, "reduction_type": "MEAN", "redis": self.proxy.url}
        options |= self.options
        return self.training.chief(self.parameters, **options)

    def work(self, number):
        with self.training.worker(number) as worker:
            for step, parameters in worker.steps():
                self.begun.add(step)
                worker.apply(gradient_of(number, step, parameters))

    def lead(self, chief, disturb, *, after=3, until=LAST, at_once=True):
        """Returns the steps that the loop has yielded. Unless it is at once, ``disturb`` calls the method itself."""
        steps = []
        for step in chief.updates(until=until):
            steps.append(step)
            # Workers do not announce their first gradients, so a reducer may come too late for the first update. The
            # clock runs faster than real time here.
            if step == 1:
                self.durations(least_patience=1e6, longest_patience=1e6)
                self.proxy.listen_anew()
            if step == after and at_once:
                self.disturb(disturb)
            elif step == after:
                disturb()
        return steps

    def disturb(self, disturb):
        """Disturbs the training. Afterwards, the chief computes what reducers have missed."""
        assert sum(self.proxy.lengths["request"]) < self.parameters["w"].nbytes
        self.durations(least_patience=0.2, longest_patience=0.2)
        disturb()

    def finish(self, chief, step=LAST):
        """Compares with a training without Redis."""
        for one in self.crew:
            one.result(60)
        local = LocalTraining(OPTIMIZER, self.parameters, weights=(1.0,) * CREW).train(step)
        assert differences(local, chief.latest()[1], state_of(chief)) == []
        chief.delete()


@pytest.fixture
def disturbed(training, background, reducing, proxy, durations):
    durations(longest_patience=0.2, abandoned=0.0)
    return Disturbed(training, background, reducing, proxy, durations)


def parts(client, pattern="redisacc:{train/*}:partition:blob:*"):
    return sorted(key for key in client.scan_iter(pattern) if client.pttl(key) == -1)


def said(caplog, text):
    return any(text in record.getMessage() for record in caplog.records)


@pytest.mark.slow(keep="slot")
@pytest.mark.parametrize(
    "options", [{}, {"partitions": 3}, {"encoding": "bfloat16"}], ids=["slot", "partitions", "bf16"]
)
def test_everything_is_lost(disturbed, client, caplog, options):
    chief = disturbed.begin(**options)
    steps = disturbed.lead(chief, client.flushall)
    assert steps == [1, 2, 3, 4, 5, 6]
    assert said(caplog, "Restoring step 3 from the memory of the chief and of reducers")
    if options == {"encoding": "bfloat16"}:
        assert chief.latest()[0] == LAST
        chief.delete()
    else:
        disturbed.finish(chief)


@pytest.mark.slow
def test_parts_of_the_version_are_lost(disturbed, client):
    """As if one node of a cluster came back without data while workers compute."""
    chief = disturbed.begin(partitions=3)

    def lose():
        lost = [key for key in parts(client) if key.endswith(b":1")]
        assert len(lost) >= 3
        client.delete(*lost)

    assert disturbed.lead(chief, lose) == [1, 2, 3, 4, 5, 6]
    disturbed.finish(chief)


def test_a_successor_finds_parts_of_the_version_lost(disturbed, client):
    chief = disturbed.begin(partitions=3)
    with pytest.raises(ZeroDivisionError):
        disturbed.lead(chief, lambda: 1 / 0)
    chief.close()
    client.delete(*[key for key in parts(client) if key.endswith(b":0")])
    successor = disturbed.chief()
    assert [*successor.updates(until=LAST)] == [4, 5, 6]
    disturbed.finish(successor)


def test_a_part_of_a_gradient_is_lost(disturbed, client, until, caplog):
    """Its worker applies it again, and so do the others of the step."""
    chief = disturbed.begin(partitions=3)
    lost = []

    def lose():
        # Those of an earlier attempt may still be there: a reducer came too late for it.
        number = int(client.hget("redisacc:{train}:parameters", "attempts")) + 1
        updated = f"redisacc:{{train/*}}:partition:blob:*-{number}-*:1"
        # The weights and two slots, which the reducer does not write again.
        until(lambda: sum(client.pttl(key) > 0 for key in client.scan_iter(updated)) == 3)
        lost.extend(client.scan_iter("redisacc:{train/*}:partition:part:*:1"))
        client.delete(*lost, *client.scan_iter(updated))

    # When the chief has got the round, and has read what is in it.
    assert disturbed.lead(chief, lambda: disturbed.proxy.before("register_version", lose)) == [1, 2, 3, 4, 5, 6]
    assert lost
    assert said(caplog, "Beginning step 3 again: its workers apply their gradients again")
    disturbed.finish(chief)


def test_everything_is_lost_right_after_a_commit(disturbed, client, late, until):
    """Reducers know of the new version by then, and nobody has the one before."""
    losses = []

    def lose():
        if client.hget("redisacc:{train}:parameters", "step") == b"3":
            until(lambda: "HMGET" in late.sent)
            disturbed.disturb(client.flushall)
            losses.append(3)
        else:
            # The script has said that a part is missing.
            commits()

    def commits():
        disturbed.proxy.before("publish", late.listen_anew)
        disturbed.proxy.after("publish", lose)

    chief = disturbed.begin(reducers_at=late.url)
    assert disturbed.lead(chief, commits, after=2, at_once=False) == [1, 2, 3, 4, 5, 6]
    assert losses == [3]
    disturbed.finish(chief)


@pytest.mark.loses_data
@pytest.mark.parametrize("kept", thorough([0.0, 60.0], usual=[0.0]))
def test_a_reducer_keeps_what_it_has_for_a_while(disturbed, client, until, durations, clock, caplog, kept):
    durations(kept=kept, gathering=2.0 if kept else 0.2)
    chief = disturbed.begin()

    def lose():
        until(lambda: 3 in disturbed.begun)
        client.flushall()
        # The reducer finds that out, and forgets what it has, or not.
        began = clock.now()
        until(lambda: clock.now() - began > 5)

    if kept:
        assert disturbed.lead(chief, lose)[-1] == LAST
        disturbed.finish(chief)
        return
    # It continues with what a worker has, and says that the state is lost.
    assert disturbed.lead(chief, lose) == [1, 2, 3, 4, 5, 6]
    assert said(caplog, "continuing at step 3 with the parameters of a living worker. The state of the chief")
    assert int(chief.latest_state()[1]["updates"]) == 3
    for one in disturbed.crew:
        one.result(60)


@pytest.mark.slow
@pytest.mark.loses_data
def test_a_chief_continues_from_a_checkpoint_if_the_state_is_lost(
    disturbed, client, tmp_path, durations, until, caplog
):
    durations(kept=0.0, gathering=0.2)
    chief = disturbed.begin(checkpoint=tmp_path, checkpoint_every=1)

    def lose():
        until((tmp_path / "step-00000003.safetensors").exists)
        disturbed.reducers[0].close()
        client.flushall()

    with caplog.at_level(logging.WARNING, "redisacc"):
        assert disturbed.lead(chief, lose) == [1, 2, 3, 4, 5, 6]
    assert said(caplog, "continuing from the checkpoint of step 3")
    disturbed.finish(chief)


def test_tables_that_nobody_has(training, client):
    """The chief was started again, so it has computed none of them, and reducers have none."""
    parameters = {"w": np.ones(3, np.float32), "table": np.ones((4, 2), np.float32)}
    training.chief(parameters, optimizer=OPTIMIZER, sparse=["table"]).close()
    chief = training.chief(parameters, optimizer=OPTIMIZER, sparse=["table"])
    client.flushall()
    with pytest.raises(
        redisacc.DataLossError, match=r"this process lacks the tables of its sparse leaves\. Start the chief again"
    ):
        next(chief.updates(until=1))
