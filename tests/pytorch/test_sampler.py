"""Each example is used once in an epoch, by one worker, whatever is started again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn, optim
from torch.utils.data import DataLoader

import redisacc
from redisacc.torch import Sampler


def at_step(step=0):
    """Returns the progress of a process that has come to a step."""
    return SimpleNamespace(step=step, jumped=0, finished=False, is_late=False)


def share(number, progress=None, *, size=23, workers=3, batch_size=4, shuffle=True, seed=0):
    return Sampler(
        range(size),
        batch_size,
        number=number,
        workers=workers,
        shuffle=shuffle,
        seed=seed,
        progress=progress or at_step(),
    )


def batches(of, at, epochs):
    """Returns what a process uses in each step, in a loop over epochs as users write it."""
    found = {}
    for _ in range(epochs):
        for batch in DataLoader(range(1000), 4, sampler=of):
            found[at.step] = batch.tolist()
            at.step += 1
    return found


@pytest.mark.parametrize("size", [23, 24, 5, 1])
def test_an_epoch_has_each_example_once_and_all_workers_equally_many_batches(size):
    every = []
    for number in range(3):
        at = at_step()
        every.append(batches(share(number, at, size=size), at, 6))
    assert {len(one) for one in every} == {-(-6 * size // 12)}
    assert all(len(batch) == 4 for one in every for batch in one.values())
    used = [index for step in every[0] for one in every for index in one[step]]
    for epoch in range(6):
        assert sorted(used[epoch * size : (epoch + 1) * size]) == list(range(size))
    if size == 23:
        assert used[:23] != used[23:46]


@pytest.mark.parametrize("sets_epoch", [False, True])
def test_a_sampler_that_is_made_in_each_epoch(sets_epoch, caplog):
    """Its first pass is over epoch 0, so nothing would be left of the training, without a word."""
    at, found = at_step(), []
    for epoch in range(2):
        at.is_late = at.step > 0
        of = share(0, at, size=12)
        if sets_epoch:
            of.set_epoch(epoch)
        found.append(len(batches(of, at, 1)))
    assert found == ([1, 1] if sets_epoch else [1, 0])
    assert ("Create the sampler once, before the loop over epochs" in caplog.text) is not sets_epoch


def test_a_restart_neither_loses_nor_repeats_an_example():
    at = at_step()
    whole = batches(share(1, at), at, 3)
    for killed_at in range(6):
        again = at_step(killed_at)
        rest = batches(share(1, again), again, 3)
        assert rest == {step: batch for step, batch in whole.items() if step >= killed_at}


def test_a_pass_over_an_epoch_that_is_over_is_empty():
    at = at_step(3)
    of = share(0, at)
    assert list(of) == []
    assert of.epoch == 1
    of.set_epoch(0)
    assert list(of) == []
    assert len(of) == len(of.steps(1)) * 4


def test_steps_that_others_made_alone_are_left_out():
    at = at_step()
    of = share(0, at, size=120)
    found = iter(of)
    first = [next(found) for _ in range(4)]
    at.step, at.jumped = 3, 2
    rest = [first, *([next(found) for _ in range(4)] for _ in range(7))]
    undisturbed = list(share(0, size=120))
    assert [index for batch in rest for index in batch] == undisturbed[:4] + undisturbed[12:]
    assert next(found, None) is None


def test_a_pass_that_begins_before_the_last_step_is_made_repeats_nothing():
    at = at_step()
    ahead = share(0, at, size=24)
    first = list(ahead)
    # Of the two steps of an epoch, one is made.
    at.step = 1
    second = list(ahead)
    at = at_step()
    usual = batches(share(0, at, size=24), at, 2)
    assert first + second == [index for step in range(4) for index in usual[step]]


def test_it_ends_with_the_training():
    at = at_step()
    found = iter(share(0, at))
    assert len([next(found) for _ in range(4)]) == 4
    at.finished = True
    assert next(found, None) is None


def test_another_number_of_workers_begins_where_it_would_be_by_now():
    """That is a part of the contract: the docstring of ``Optimizer.sampler`` says so."""
    before, after = share(0, at_step(4), size=100, workers=2), share(0, at_step(4), size=100, workers=4)
    assert (before.steps(0), after.steps(0)) == (range(13), range(7))
    # Four steps of two workers have used 32 examples, and four steps of four would have used 64.
    assert list(after) == list(share(0, size=100, workers=4))[16:]


def test_without_shuffling_and_with_another_seed():
    assert list(share(0, size=24, shuffle=False)) == [0, 1, 2, 3, 12, 13, 14, 15]
    assert list(share(0, seed=1)) != list(share(0))


@pytest.mark.servers("valkey")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": []}, "at least one example"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"seed": -1}, "seed must be"),
        ({"shuffle": 3}, "shuffle must be"),
        ({"workers": 1}, "this is worker 1, and the data is .* start all processes with more workers="),
    ],
)
def test_arguments_that_cannot_be_right(wrap, given, message):
    options = {"data": range(23), "batch_size": 4, "workers": 3, **given}
    workers = options.pop("workers")
    for number in (0, 1):
        model = nn.Linear(1, 1)
        optimizer = wrap(model, optim.SGD(model.parameters()), workers=workers, number=number)
        optimizer._start(False)
    with pytest.raises(redisacc.InvalidArgumentError, match=message):
        optimizer.sampler(**options)
