"""Each process makes the steps with torch's own optimizer and the mean gradient: the same bits as torch alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from networks import Large, Net, batch, loss_of, weights_of
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import redisacc
import redisacc.torch

pytestmark = [pytest.mark.servers("valkey"), pytest.mark.timeout(60)]

STEPS = 6


def of_groups(kind, *options, **common):
    """Returns what makes an optimizer with a group for the table, and one for the rest."""

    def make(model):
        rest = [each for name, each in model.named_parameters() if not name.startswith("words")]
        return kind([{"params": [model.words.weight], **options[0]}, {"params": rest, **options[1]}], **common)

    return make


MAKE = {
    "SGD": of_groups(torch.optim.SGD, {"lr": 1e-3}, {"weight_decay": 0.1}, lr=0.1, momentum=0.9),
    "AdamW": of_groups(torch.optim.AdamW, {"weight_decay": 0.3}, {"betas": (0.8, 0.9), "lr": 0.001}, lr=0.02),
    "NAdam": of_groups(torch.optim.NAdam, {}, {"lr": 0.01}),
    "Adafactor": of_groups(torch.optim.Adafactor, {}, {"lr": 0.05}),
}


def cosine(optimizer):
    return CosineAnnealingLR(optimizer, 10, eta_min=1e-4)


def one_cycle(optimizer):
    return OneCycleLR(optimizer, 0.05, total_steps=20)


def train(wrap, make, schedule=cosine, weights=(1.0,) * 3, change=lambda model, step: None, **options):
    """Runs the loop of a process, as users write it."""
    model = Net()
    optimizer = wrap(model, make(model), fused=False, until=STEPS, **options)
    scheduler = optimizer.resume(schedule(optimizer))
    while not optimizer.finished:
        step, number = optimizer.training_step, optimizer.training.number
        change(model, step)
        x, y = batch(step, number)
        cross_entropy(model(x), y).backward()
        optimizer.step(weight=weights[number])
        optimizer.zero_grad()
        scheduler.step()
    return model


def alone(make, workers, schedule=cosine, weights=(1.0,) * 3, change=lambda model, step: None, clip_norm=None):
    """Returns what torch alone makes of the mean gradient."""
    model = Net()
    inner = make(model)
    scheduler = schedule(inner)
    for step in range(STEPS):
        change(model, step)
        sums, total = {}, np.float32(sum(weights[:workers]))
        for number in range(workers):
            inner.zero_grad()
            x, y = batch(step, number)
            cross_entropy(model(x), y).backward()
            for name, each in model.named_parameters():
                if each.grad is not None:
                    sums[name] = sums.get(name, 0) + each.grad * weights[number]
        for name, each in model.named_parameters():
            each.grad = sums[name] / total if name in sums else None
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        inner.step()
        scheduler.step()
    return model


def check_equal(running, expected):
    for one in running:
        for name, values in weights_of(one.result(50)).items():
            np.testing.assert_array_equal(values, weights_of(expected)[name], err_msg=name)


@pytest.mark.parametrize("name", MAKE)
def test_equals_torch_alone_with_the_mean_gradient(wrap, background, name):
    running = [background(train, wrap, MAKE[name], workers=2) for _ in range(2)]
    check_equal(running, alone(MAKE[name], 2))


@pytest.mark.parametrize("encoding", [None, "bfloat16", "int8"])
def test_weights_of_gradients_and_clipping_and_momentum_that_changes(wrap, background, encoding):
    how = {"schedule": one_cycle, "clip_norm": 0.2}
    weights = (1.0, 3.0, 0.7) if encoding is None else (1.0,) * 3
    running = [
        background(train, wrap, MAKE["AdamW"], workers=3, encoding=encoding, weights=weights, **how) for _ in range(3)
    ]
    expected = alone(MAKE["AdamW"], 3, weights=weights, **how)
    models = [one.result(50) for one in running]
    for model in models:
        for name, values in weights_of(model).items():
            if encoding is None:
                # Sums with weights are rounded otherwise here.
                np.testing.assert_allclose(values, weights_of(expected)[name], rtol=1e-4, atol=1e-5)
            np.testing.assert_array_equal(values, weights_of(models[0])[name])


def test_the_snapshot_has_the_weights_and_the_state_of_the_optimizer(wrap, real_client):
    model = Net()
    optimizer = wrap(model, fused=False, until=3)
    while not optimizer.finished:
        cross_entropy(model(batch(0, 0)[0]), batch(0, 0)[1]).backward()
        optimizer.step()
    with redisacc.Parameters("torch.snapshot", redis=real_client) as snapshot:
        step, weights = snapshot.latest()
    assert step == 3
    for name, values in weights_of(model).items():
        np.testing.assert_array_equal(weights[name], values)
    other = Net()
    late = wrap(other, fused=False, until=3)
    assert (late.finished, late.training_step) == (True, 3)
    np.testing.assert_array_equal(other.out.weight.detach(), model.out.weight.detach())
    ours, theirs = late.state_dict(), optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    for number, state in theirs["state"].items():
        for key, value in state.items():
            assert torch.equal(ours["state"][number][key], value)


def step_of(model, optimizer):
    optimizer.zero_grad()
    x, y = batch(optimizer.training_step, optimizer.training.number)
    cross_entropy(model(x), y).backward()
    optimizer.step()


def state_of(optimizer):
    return [value for state in optimizer.state_dict()["state"].values() for _, value in sorted(state.items())]


@pytest.mark.parametrize("every", [1000, 3])
def test_whoever_is_late_or_comes_late_makes_all_steps(wrap, until, every):
    """The quorum is 1, so the first process makes steps while the others do nothing."""
    models = [Net() for _ in range(3)]
    for model in models[1:]:
        for each in model.parameters():
            torch.nn.init.normal_(each)
    options = {"workers": 2, "quorum": 1, "fused": False, "snapshot_every": every}
    first = wrap(models[0], MAKE["NAdam"](models[0]), **options)
    step_of(models[0], first)
    late = wrap(models[1], MAKE["NAdam"](models[1]), **options)
    # They began with the weights of number 0.
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
    for _ in range(10):
        step_of(models[0], first)
    if every == 3:
        until(lambda: (first.training.snapshot or 0) >= 3)
    step_of(models[0], first)
    step_of(models[1], late)
    joins = wrap(models[2], MAKE["NAdam"](models[2]), **options, number=2)
    assert (first.training_step, late.training_step, joins.training_step) == (12, 12, 12)
    for model, optimizer in ((models[1], late), (models[2], joins)):
        for one, other in zip(models[0].parameters(), model.parameters(), strict=True):
            assert torch.equal(one, other)
        assert all(torch.equal(*pair) for pair in zip(state_of(first), state_of(optimizer), strict=True))


def freeze(model, step):
    model.inner.requires_grad_(step not in (2, 3))
    # A gradient is None at first, and then again.
    model.out.requires_grad_(step > 0)


def test_frozen_parameters_stay_where_they_are_and_may_return(wrap, background):
    running = [background(train, wrap, MAKE["AdamW"], workers=2, change=freeze) for _ in range(2)]
    check_equal(running, alone(MAKE["AdamW"], 2, change=freeze))


def test_a_gradient_that_only_one_process_has_counts_half(wrap, background):
    def run():
        model = Net()
        optimizer = wrap(model, MAKE["SGD"](model), fused=False, workers=2)
        loss = model.unused.weight.sum() if optimizer.training.number else model.out.bias.sum()
        loss.backward()
        optimizer.step()
        return model

    expected = Net()
    inner = MAKE["SGD"](expected)
    ((expected.unused.weight.sum() + expected.out.bias.sum()) / 2).backward()
    inner.step()
    check_equal([background(run) for _ in range(2)], expected)


def test_a_step_that_all_skip_moves_nothing(wrap):
    model = Net()
    optimizer = wrap(model, fused=False)
    step_of(model, optimizer)
    before = [each.detach().clone() for each in model.parameters()]
    cross_entropy(model(batch(0, 0)[0]), batch(0, 0)[1]).backward()
    optimizer.step(weight=0)
    assert optimizer.training_step == 2
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_processes_whose_groups_differ_say_where(wrap, background):
    def run(number):
        model = Net()
        inner = MAKE["AdamW"](model)
        with wrap(model, inner, workers=2, number=number, fused=False) as optimizer:
            for step in range(4):
                if step == 2 and number:
                    inner.param_groups[1]["betas"] = (0.8, 0.95)
                if step == 3:
                    optimizer.clip_grad_norm_(0.5 + number)
                cross_entropy(model(batch(step, number)[0]), batch(step, number)[1]).backward()
                before = model.out.weight.detach().clone()
                try:
                    optimizer.step()
                except redisacc.InvalidArgumentError as error:
                    said.append(str(error))
                    # The step counts, and changes nothing, also for those who make it later.
                    assert torch.equal(before, model.out.weight)
                    inner.param_groups[1]["betas"] = (0.8, 0.9)
            return model

    said: list[str] = []
    running = [background(run, number) for number in range(2)]
    check_equal(running[1:], running[0].result(50))
    assert all("let it depend on nothing but the step" in text for text in said)
    assert sorted(text.split(":")[0] for text in said) == [
        f"betas[1] of parameter group 1 must be the same in all processes, but is {value} here and something else in "
        "another one"
        for value in (0.9, 0.95)
    ] + [
        f"the largest norm of the mean gradient must be the same in all processes, but is {value} here and something "
        "else in another one"
        for value in (0.5, 1.5)
    ]


def test_processes_that_round_differently_return_to_equal_weights(wrap, background, caplog):
    def change(model, step):
        if step == 1 and model is next(iter(optimizers)):
            optimizers[model].state[model.out.weight]["momentum_buffer"].add_(1e-3)

    def make(model):
        optimizers[model] = MAKE["SGD"](model)
        return optimizers[model]

    optimizers: dict = {}
    running = [background(train, wrap, make, workers=2, snapshot_every=2, change=change) for _ in range(2)]
    check_equal(running, running[0].result(50))
    assert caplog.text.count("at step 2, this process and another one had weights that differ") == 2
    assert caplog.text.count("had weights that differ") == 2


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("numbers", [(0, 1, 0), (0, 1, 2), (None, None, None)])
def test_processes_that_train_on_the_same_examples_are_told_so_once(wrap, background, caplog, numbers, fused):
    """With None, all gradients are 0."""

    def run(number, of_batch):
        model = Net()
        optimizer = wrap(model, fused=fused, workers=3, number=number, snapshot_every=1)
        optimizer.training.keep(number)
        for step in range(2):
            x, y = batch(step, of_batch or 0)
            (cross_entropy(model(x), y) * (of_batch is not None)).backward()
            optimizer.step()
            optimizer.zero_grad()

    for one in [background(run, *each) for each in enumerate(numbers)]:
        one.result(50)
    said = "Give the DataLoader sampler=optimizer.sampler(data, batch_size)"
    assert caplog.text.count(said) == (1 if numbers == (0, 1, 0) else 0)


def test_what_needs_the_fused_update_is_refused_by_name(wrap):
    for options, what in (({"ema": 0.9}, "ema"), ({}, "sparse")):
        model = Net(sparse=what == "sparse")
        with pytest.raises(redisacc.InvalidArgumentError, match=f"{what} must be left out with fused=False"):
            wrap(model, torch.optim.SGD(model.parameters()), fused=False, **options)
    dense = Net()
    with pytest.raises(redisacc.InvalidArgumentError, match="needs no closure, unlike LBFGS"):
        wrap(dense, torch.optim.LBFGS(dense.parameters()), fused=False)
    inner = torch.optim.SGD(dense.parameters())
    inner.generator = torch.Generator()
    with pytest.raises(redisacc.InvalidArgumentError, match="draw no random numbers with fused=False, unlike SGD"):
        wrap(dense, inner, fused=False)
    del inner.generator
    wrap(dense, inner, fused=False)
    with pytest.raises(redisacc.InvalidArgumentError, match=r"call step\(\) of the redisacc"):
        inner.step()


def test_gradients_leave_during_the_backward_pass(wrap):
    ours, theirs = Large(), Large()
    optimizer = wrap(ours, torch.optim.SGD(ours.parameters(), lr=0.1), fused=False)
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for step in range(3):
        for model, one in ((ours, optimizer), (theirs, plain)):
            one.zero_grad()
            loss_of(model, step).backward()
            one.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
