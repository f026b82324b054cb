"""Learning rates are those of the schedulers, in processes that start late as well; other options must not change."""

from __future__ import annotations

import pytest
import torch
from networks import Net, batch, weights_of
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler

import redisacc

pytestmark = [pytest.mark.servers("valkey"), pytest.mark.timeout(60)]

STEPS = 7
MAKE = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20, cycle_momentum=False),
    "warm-up": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
}


def step(model, optimizer, scheduler, number):
    cross_entropy(model(batch(number, 0)[0]), batch(number, 0)[1]).backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)


@pytest.mark.parametrize("name", MAKE)
def test_a_process_that_starts_late_has_the_rate_of_the_training(wrap, name):
    rates = []
    plain = Net()
    alone = sgd(plain)
    scheduler = MAKE[name](alone)
    for number in range(STEPS):
        rates.append(alone.param_groups[0]["lr"])
        step(plain, alone, scheduler, number)
    assert len(set(rates)) > 2

    logged = {}
    model = Net()
    for first, last in ((0, 4), (4, STEPS)):
        # The second time, as if the process were started again.
        model = Net()
        optimizer = wrap(model, sgd(model), log=lambda step, means: logged.update({step: means["lr"]}))
        scheduler = optimizer.resume(MAKE[name](optimizer))
        for number in range(first, last):
            step(model, optimizer, scheduler, number)
        optimizer.close()
    assert [logged[number] for number in range(STEPS)] == pytest.approx(rates)
    for ours, theirs in zip(weights_of(model).values(), weights_of(plain).values(), strict=True):
        torch.testing.assert_close(torch.from_numpy(ours), torch.from_numpy(theirs))


def test_steps_that_others_make_alone_move_its_schedulers_too(wrap):
    """One gradient makes a step, so the faster process leaves the other one behind."""
    slow, fast = Net(), Net()
    of_slow = wrap(slow, sgd(slow))
    slow(batch(0, 0)[0])
    of_fast = wrap(fast, sgd(fast))
    kept = of_slow.resume(MAKE["step"](of_slow))
    # The loop steps this one once in an epoch.
    other = of_slow.resume(MAKE["cosine"](of_slow), steps=0)
    scheduler = of_fast.resume(MAKE["step"](of_fast))
    for number in range(4):
        step(fast, of_fast, scheduler, number)
    step(slow, of_slow, kept, 0)
    # Its gradient of step 0 is stale, and it continues from step 4.
    assert (of_slow.training_step, kept.last_epoch, other.last_epoch) == (4, 4, 0)
    assert of_slow.param_groups[0]["lr"] == of_fast.param_groups[0]["lr"] == 0.05
    assert all(torch.equal(a, b) for a, b in zip(slow.parameters(), fast.parameters(), strict=True))


@pytest.mark.parametrize("resumes", [False, True])
def test_a_restarted_process_says_that_its_scheduler_begins_again(wrap, caplog, resumes):
    for last in (2, 4):
        model = Net()
        optimizer = wrap(model, sgd(model), until=last)
        scheduler = MAKE["step"](optimizer)
        if resumes:
            optimizer.resume(scheduler)
        while not optimizer.finished:
            step(model, optimizer, scheduler, optimizer.training_step)
        optimizer.close()
    said = [
        record.getMessage() for record in caplog.records if "call optimizer.resume(scheduler)" in record.getMessage()
    ]
    assert ["the run is at step 2" in text for text in said] == [True] * (not resumes)


def cycle_momentum(optimizer):
    lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20, base_momentum=0.3)


def decay_less(optimizer):
    optimizer.param_groups[0]["weight_decay"] = 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            cycle_momentum,
            r"^momentum of .* was 0\.5 .* is 0\.95 now, .* turn that off, for example with "
            r"OneCycleLR\(…, cycle_momentum=False\)$",
        ),
        (decay_less, r"^weight_decay of parameter group 0 was 0 .* is 0\.5 now, but only the learning rate may change"),
    ],
)
def test_another_option_that_changes_is_an_error(wrap, change, message):
    model = Net()
    optimizer = wrap(model, sgd(model))
    change(optimizer)
    cross_entropy(model(batch(0, 0)[0]), batch(0, 0)[1]).backward()
    with pytest.raises(redisacc.InvalidArgumentError, match=message):
        optimizer.step()
    assert optimizer.training.latest()[0] == 0


def test_a_scheduler_that_depends_on_the_loss_cannot_be_resumed(wrap):
    optimizer = wrap(Net())
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(redisacc.InvalidArgumentError, match="unlike ReduceLROnPlateau: step it without resume"):
        optimizer.resume(scheduler)
