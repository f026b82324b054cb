"""Models that several processes train: they equal what one process would make of the mean gradient, bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from networks import Net, batch, weights_of
from support.local_updates import LocalTraining, differences
from torch import nn
from torch.nn.functional import cross_entropy

import redisacc
import redisacc.torch
from redisacc import optim

pytestmark = [pytest.mark.servers("valkey"), pytest.mark.timeout(60)]

STEPS = 6


def train(wrap, make, sparse=False, steps=STEPS, weights=(1.0,) * 3, holds=False, **options):
    """Runs the loop of a process, as users write it, with all gradients sent in step() if they are held back."""
    model = Net(sparse)
    optimizer = wrap(model, make(model.parameters()), **options)
    scheduler = optimizer.resume(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step))
    while optimizer.training_step < steps and not optimizer.finished:
        x, y = batch(optimizer.training_step, optimizer.training.number)
        with optimizer.no_sync() if holds else contextlib.nullcontext():
            cross_entropy(model(x), y).backward()
        optimizer.step(weight=weights[optimizer.training.number])
        optimizer.zero_grad()
        scheduler.step()
    return model, optimizer


def expected(optimizer, workers, sparse=False, until=STEPS, weights=(1.0,) * 3, **options):
    """Returns what one process makes of the mean gradient with an optimizer of redisacc.optim."""
    model = Net()
    with_rate = dataclasses.replace(optimizer, lr=lambda step: optimizer.lr * 0.9**step, **options)

    def gradient(number: int, step: int, parameters: Any) -> Any:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(np.array(parameters[name])))
        model.zero_grad()
        x, y = batch(step, number)
        cross_entropy(model(x), y).backward()
        result = {}
        for name, parameter in model.named_parameters():
            grad = np.zeros(tuple(parameter.shape), np.float32) if parameter.grad is None else parameter.grad.numpy()
            if sparse and name == "words.weight":
                rows = np.unique(x.numpy())
                result[name] = redisacc.IndexedSlices(grad[rows], rows)
            else:
                result[name] = grad.copy()
        return result

    begin = {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}
    return LocalTraining(with_rate, begin, weights=weights[:workers], gradient=gradient).train(until)


MAKE = {
    "SGD": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "Adam": lambda given: torch.optim.Adam(given, lr=0.02, amsgrad=True, betas=(0.8, 0.99)),
    "AdamW": lambda given: torch.optim.AdamW(given, lr=0.02, weight_decay=0.1),
    "Adagrad": lambda given: torch.optim.Adagrad(given, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "RMSprop": lambda given: torch.optim.RMSprop(given, lr=0.01, momentum=0.5, centered=True),
    "maximize": lambda given: torch.optim.SGD(given, lr=0.01, maximize=True),
}

# What makes the same updates here.
COUNTERPARTS = {
    "SGD": optim.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "Adam": optim.Adam(0.02, amsgrad=True, betas=(0.8, 0.99)),
    "AdamW": optim.AdamW(0.02, weight_decay=0.1),
    "Adagrad": optim.Adagrad(0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "RMSprop": optim.RMSprop(0.01, momentum=0.5, centered=True),
    "maximize": optim.SGD(0.01, maximize=True),
}


@pytest.mark.parametrize("name", MAKE)
def test_equals_the_kernel_and_torch_itself(wrap, name):
    make = MAKE[name]
    model, optimizer = train(wrap, make)
    state = optimizer.training.latest_state()[1]
    slots = {slot: leaves for slot, leaves in state.items() if slot != "updates"}
    assert differences(expected(COUNTERPARTS[name], 1), weights_of(model), slots) == []
    # Torch fuses multiplications and additions on some processors.
    plain = Net()
    alone = make(plain.parameters())
    for step in range(STEPS):
        for group in alone.param_groups:
            group["lr"] = group.setdefault("first_lr", group["lr"]) * 0.9**step
        cross_entropy(plain(batch(step, 0)[0]), batch(step, 0)[1]).backward()
        alone.step()
        alone.zero_grad()
    used = [name for name in weights_of(plain) if not name.startswith("unused")]
    for each in used:
        np.testing.assert_allclose(weights_of(model)[each], weights_of(plain)[each], rtol=1e-4, atol=1e-5)
    # What is gathered continues in torch, and has all of it.
    alone.load_state_dict(optimizer.state_dict())
    of_first = alone.state[next(iter(plain.parameters()))]
    for slot, leaves in slots.items():
        np.testing.assert_array_equal(of_first[slot].numpy(), leaves["words.weight"])


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_several_processes_equal_one_that_has_the_mean_gradient(wrap, background, workers, sparse):
    make = MAKE["Adagrad"]
    running = [background(train, wrap, make, sparse, workers=workers, clip_norm=0.05) for _ in range(workers)]
    models = [one.result(50)[0] for one in running]
    local = expected(COUNTERPARTS["Adagrad"], workers, sparse, clip_norm=0.05)
    if sparse:
        # The tables' squares come last in the norm, so its last bit may differ.
        for name, values in local.parameters.items():
            np.testing.assert_allclose(weights_of(models[0])[name], values, rtol=1e-5)
    else:
        assert differences(local, weights_of(models[0]), local.state) == []
    for other in models[1:]:
        assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), other.parameters(), strict=True))


def test_weights_of_gradients_and_an_average_of_the_weights(wrap, background):
    options = {"weights": (1.0, 3.0), "ema": 0.5}
    running = [background(train, wrap, MAKE["AdamW"], workers=2, holds=holds, **options) for holds in (False, True)]
    model, optimizer = running[0].result(50)
    running[1].result(50)
    local = expected(COUNTERPARTS["AdamW"], 2, **options)
    state = optimizer.training.latest_state()[1]
    assert local.state.keys() >= {"ema"}
    assert differences(local, weights_of(model), {slot: state[slot] for slot in local.state}) == []
    # Torch has no such average, and loads the rest.
    torch.optim.AdamW(Net().parameters()).load_state_dict(optimizer.state_dict())


def test_groups_have_their_own_rates_and_decay(wrap):
    def make(given):
        every = list(given)
        return torch.optim.AdamW(
            [{"params": every[:1], "lr": 0.005}, {"params": every[1:3]}, {"params": every[3:], "weight_decay": 0.0}],
            lr=0.02,
            weight_decay=0.1,
        )

    model, optimizer = train(wrap, make, fused=True)
    # The largest group is the base.
    rest = ("unused.weight", "unused.bias", "out.weight", "out.bias")
    local = expected(optim.AdamW(0.02, weight_decay=0.1, lr_factor={"words.weight": 0.25}, no_decay=rest), 1)
    state = optimizer.training.latest_state()[1]
    assert differences(local, weights_of(model), {slot: state[slot] for slot in local.state}) == []


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 3)
        random = torch.Generator().manual_seed(0)
        for layer in (self.words, self.out):
            nn.init.normal_(layer.weight, std=0.3, generator=random)
        nn.init.zeros_(self.out.bias)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.norm(self.words(words).sum(dim=1))))


def test_statistics_of_batch_norm_stay_in_their_process_until_they_are_computed_with_the_last_weights(
    wrap, background, caplog
):
    def run():
        model = Normed()
        optimizer = wrap(model, workers=2, until=8)
        while not optimizer.finished:
            x, y = batch(optimizer.training_step, optimizer.training.number)
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    running = [background(run) for _ in range(2)]
    one, other = [each.result(50) for each in running]
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not torch.equal(one.norm.running_mean, other.norm.running_mean)
    assert "update_bn" not in caplog.text
    late = Normed()
    wrap(late, workers=2, until=8)
    assert caplog.text.count("call sync_buffers(), or torch.optim.swa_utils.update_bn(loader, model)") == 1
    loader = [batch(step, 0)[0] for step in range(4)]
    for model in (one, other, late):
        torch.optim.swa_utils.update_bn(loader, model)
    for model in (other, late):
        assert all(torch.equal(a, b) for a, b in zip(one.buffers(), model.buffers(), strict=True))


def test_frozen_parameters_neither_travel_nor_decay(wrap):
    def make(model):
        groups = [{"params": model.words.parameters(), "lr": 0.1}, {"params": model.out.parameters()}]
        return torch.optim.AdamW(groups, lr=0.02, weight_decay=0.5)

    ours, theirs = Net(), Net()
    for model in (ours, theirs):
        model.words.requires_grad_(False)
    optimizer, plain = wrap(ours, make(ours), fused=True), make(theirs)
    for model, one in ((ours, optimizer), (theirs, plain)):
        cross_entropy(model(batch(0, 0)[0]), batch(0, 0)[1]).backward()
        one.step()
    assert optimizer.training.latest()[1].keys() == {"out.weight", "out.bias"}
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert optimizer.state_dict()["state"].keys() == plain.state_dict()["state"].keys()
    ours.words.requires_grad_()
    cross_entropy(ours(batch(0, 0)[0]), batch(0, 0)[1]).backward()
    with pytest.raises(redisacc.InvalidArgumentError, match=r"call requires_grad_\(\) before that"):
        optimizer.step()
    ours.requires_grad_(False)
    with pytest.raises(redisacc.InvalidArgumentError, match="none of the optimizer's parameters requires a gradient"):
        wrap(ours, make(ours), name="frozen", fused=True)


def test_references_to_weights_stay_valid_and_old_graphs_do_not(wrap):
    model = Net()
    weight, memory = model.out.weight, model.out.weight.data_ptr()
    optimizer = wrap(model)
    loss = cross_entropy(model(batch(0, 0)[0]), batch(0, 0)[1])
    loss.backward(retain_graph=True)
    optimizer.step()
    assert model.out.weight is weight
    assert weight.data_ptr() == memory
    np.testing.assert_array_equal(weight.detach(), optimizer.training.latest()[1]["out.weight"])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_closure_metrics_and_accumulation(wrap):
    seen = []
    model = Net()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.5), log=lambda step, means: seen.append(means))

    def closure():
        optimizer.zero_grad()
        with optimizer.no_sync():
            (cross_entropy(model(batch(0, 0)[0]), batch(0, 0)[1]) / 2).backward()
        loss = cross_entropy(model(batch(0, 1)[0]), batch(0, 1)[1]) / 2
        loss.backward()
        return loss

    plain = Net()
    for number in range(2):
        (cross_entropy(plain(batch(0, number)[0]), batch(0, number)[1]) / 2).backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    assert optimizer.step(closure, metrics={"loss": 3.0}).item() > 0
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    optimizer.step()
    assert seen[0] == {"loss": 3.0, "lr": 0.5}
    with pytest.raises(redisacc.InvalidArgumentError, match='must not have "lr"'):
        optimizer.step(metrics={"lr": 1.0})


def test_bfloat16_under_autocast_and_no_float16_with_a_scaler(wrap):
    model, plain = Net(), Net()
    optimizer = wrap(model)
    for one, step in ((model, optimizer.step), (plain, torch.optim.AdamW(plain.parameters(), lr=0.02).step)):
        with torch.autocast("cpu", torch.bfloat16):
            out = one(batch(0, 0)[0])
            loss = cross_entropy(out, batch(0, 0)[1])
        assert out.dtype == torch.bfloat16
        loss.backward()
        step()
    for name in ("words", "inner", "out"):
        torch.testing.assert_close(getattr(model, name).weight, getattr(plain, name).weight)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(cross_entropy(model(batch(0, 0)[0]), batch(0, 0)[1])).backward()
    with pytest.raises(redisacc.InvalidArgumentError, match=r"use torch\.autocast with bfloat16"):
        scaler.step(optimizer)
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.step(optimizer)
    assert optimizer.training_step == 2


def test_until_ends_the_training_for_all(wrap, background):
    running = [background(train, wrap, MAKE["SGD"], workers=2, until=4) for _ in range(2)]
    models = [one.result(50)[0] for one in running]
    model = Net()
    optimizer = wrap(model, MAKE["SGD"](model.parameters()), workers=2, until=4)
    assert (optimizer.finished, optimizer.training_step) == (True, 4)
    optimizer.step()
    assert torch.equal(model.out.weight, models[0].out.weight)


def test_a_process_that_ends_the_training_frees_those_that_wait(wrap, background, until, real_client):
    first = wrap(Net(), workers=2)
    first._start(False)
    model = Net()
    second = background(lambda: wrap(model, workers=2))
    other = second.result(50)
    waits = background(other.step)
    until(lambda: real_client.hlen("redisacc:{torch}:workers"))
    first.finish()
    waits.result(50)
    assert other.finished


def test_a_sampler_that_is_made_after_steps_says_that_its_epoch_is_over(wrap, caplog):
    optimizer = wrap(Net())
    assert sorted(optimizer.sampler(range(4), 4)) == [0, 1, 2, 3]
    optimizer.step()
    assert list(optimizer.sampler(range(4), 4)) == []
    assert "a pass over a sampler yields nothing" in caplog.text
    # In a process that is started again, it is what the loop over epochs begins with.
    optimizer.close()
    caplog.clear()
    assert list(wrap(Net()).sampler(range(4), 4)) == []
    assert "a pass over a sampler yields nothing" not in caplog.text


def test_torchrun_says_which_process_this_is(wrap, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    # One of its processes begins the training.
    wrap(Net(), workers=None)._start(False)
    monkeypatch.setenv("RANK", "2")
    optimizer = wrap(Net(), workers=None)
    assert (optimizer.training.number, optimizer.training.workers) == (2, 3)
    indices = list(optimizer.sampler(range(12), 4, shuffle=False))
    assert indices == [8, 9, 10, 11]
    # A step may need fewer gradients than there are processes. Each has a share of the data all the same.
    wrap(Net(), name="spare", workers=3, quorum=2, number=0)._start(False)
    optimizer = wrap(Net(), name="spare", workers=3, quorum=2, number=1)
    assert (optimizer.training.number, optimizer.training.workers) == (1, 3)
    assert list(optimizer.sampler(range(12), 4, shuffle=False)) == [4, 5, 6, 7]
    # What `redisacc run` says counts more, and arguments count most.
    monkeypatch.setenv("REDISACC_WORKERS", "4")
    monkeypatch.setenv("REDISACC_WORKER_NUMBER", "3")
    optimizer = wrap(Net(), workers=None)
    assert (optimizer.training.number, optimizer.training.workers) == (3, 3)
    monkeypatch.delenv("REDISACC_WORKER_NUMBER")
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(redisacc.InvalidArgumentError, match="RANK must be a whole number from 0 to 999999, not 'x'"):
        wrap(Net(), workers=None)


class Half(Net):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 4)


def frozen():
    model = Net()
    model.out.requires_grad_(False)
    return model


class Renamed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Linear(8, 3)


def test_another_model_under_the_same_name_is_refused(wrap):
    wrap(Net()).step()
    for other, message in (
        (Half(), r"tree at 'out\.bias' must be float32 \[3\], not float32 \[4\]"),
        (Renamed(), r"tree has 'outer\.weight', which is surplus"),
        (Net().double(), r"must be float32 .*, not float64"),
        (frozen(), r"tree lacks 'out\.bias'"),
    ):
        with pytest.raises(redisacc.InvalidArgumentError, match=message) as caught:
            wrap(other)
        assert "another model" in str(caught.value)


def sgd_of_groups(option, *values):
    """Returns what makes an optimizer with a group for each parameter, which differ in an option."""
    return lambda given: torch.optim.SGD(
        [{"params": [each], option: values[number % len(values)]} for number, each in enumerate(given)]
    )


SGD, IN_FLOAT32 = (
    torch.optim.SGD,
    r"'weight' must be float32.* Keep the weights in float32, and compute under torch.autocast",
)
# The model, what makes its optimizer, and the error.
REFUSED = [
    (Net, torch.optim.LBFGS, "Adagrad, Adam, AdamW, RMSprop, SGD, SparseAdam.*not LBFGS"),
    (Net, lambda given: SGD(given, differentiable=True), "differentiable=True has no counterpart"),
    (
        Net,
        sgd_of_groups("weight_decay", 1, 2),
        "weight_decay of parameter groups must be 0 or the same number in all, not 1 and 2",
    ),
    (
        Net,
        sgd_of_groups("momentum", 0.0, 0.1),
        "may differ in lr and weight_decay only, but momentum is 0.0 in group 0 and 0.1",
    ),
    (Net, lambda _: SGD(nn.Linear(2, 2).parameters()), r"parameter 0 of group 0, of shape \(2, 2\), is none"),
    (lambda: nn.Linear(2, 2, dtype=torch.bfloat16), SGD, IN_FLOAT32),
    (lambda: nn.Linear(2, 2, dtype=torch.complex64), SGD, IN_FLOAT32),
]


def test_what_has_no_counterpart_is_refused(wrap):
    for model, make, message in REFUSED:
        made = model()
        with pytest.raises(redisacc.InvalidArgumentError, match=message):
            wrap(made, make(list(made.parameters())), fused=True)


def test_what_cannot_change_is_refused(wrap):
    model = Net()
    every = list(model.parameters())
    optimizer = wrap(model, SGD([{"params": every[:2]}, {"params": every[2:]}], lr=0.1), fused=True)
    with pytest.raises(redisacc.InvalidArgumentError, match="give the optimizer all groups before it is wrapped"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    optimizer.param_groups[0]["lr"] = 0.05
    message = r"group 0 must stay 1 times as.* let a scheduler change all groups by the same factor"
    with pytest.raises(redisacc.InvalidArgumentError, match=message):
        optimizer.step()


@pytest.mark.parametrize("name", MAKE)
def test_a_new_training_begins_with_the_state_of_another(wrap, name):
    """The file is one that torch writes, and as long as the learning rate stays, the bits are the same."""
    make = MAKE[name]

    def run(optimizer, model, steps, number=0):
        for step in steps:
            cross_entropy(model(batch(step, number)[0]), batch(step, number)[1]).backward()
            optimizer.step()
            optimizer.zero_grad()

    whole, model = Net(), Net()
    run(wrap(whole, make(whole.parameters()), name="whole"), whole, range(5))
    first = wrap(model, make(model.parameters()), name="first")
    run(first, model, range(3))
    saved = {"model": model.state_dict(), "optimizer": first.state_dict()}
    # It is published, so there is nothing to load.
    first.load_state_dict(saved["optimizer"])
    loaded = Net()
    loaded.load_state_dict(saved["model"])
    inner = make(loaded.parameters())
    inner.load_state_dict(saved["optimizer"])
    second = wrap(loaded, inner, name="second")
    run(second, loaded, range(3, 5))
    assert second.training_step == 2
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), loaded.parameters(), strict=True))
    if name not in ("SGD", "maximize"):
        # SGD does not count.
        other = Net()
        third = wrap(other, make(other.parameters()), name="third")
        third.step()
        with pytest.raises(redisacc.InvalidArgumentError, match="load it into the optimizer before it is wrapped"):
            third.load_state_dict(saved["optimizer"])


def test_state_of_different_numbers_of_updates_is_refused(wrap):
    model = Net()
    inner = torch.optim.Adam(model.parameters())
    model.out.weight.grad = torch.ones_like(model.out.weight)
    inner.step()
    model.out.bias.grad = torch.ones_like(model.out.bias)
    inner.step()
    with pytest.raises(redisacc.InvalidArgumentError, match=r"has 2 and, for 'out.bias', 1"):
        wrap(model, inner)


def test_a_chief_of_redisacc_run_is_told_what_to_do(wrap, monkeypatch):
    monkeypatch.setenv("REDISACC_ROLE", "chief")
    with pytest.raises(redisacc.InvalidArgumentError, match="start it with `redisacc run` without --chief"):
        wrap(Net())
