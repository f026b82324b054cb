"""Steps that a process makes alone: with torch's own optimizer, and then the difference is sent."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from support.training_options import grouped
from torch import nn

import redisacc
import redisacc.torch

pytestmark = [pytest.mark.servers("valkey"), pytest.mark.timeout(60)]

EVERY = 4


def loss_of(model, step, number):
    x = torch.rand(8, 6, generator=torch.Generator().manual_seed(100 * step + number))
    return (model(x) - x.sum(dim=1, keepdim=True)).square().mean()


def net():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    random = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=random)
    return model


@pytest.fixture
def wrap(real_client):
    opened = []

    def wrapped(model, inner, outer=None, **options):
        given = grouped({"workers": 1, "redis": real_client, **options})
        local = redisacc.LocalSteps(inner, EVERY, outer)
        opened.append(redisacc.torch.Optimizer(local, "torch", model, **given))
        return opened[-1]

    yield wrapped
    for one in opened:
        one.close()


def train(wrap, make, **options):
    model = net()
    optimizer = wrap(model, make(model), until=3 * EVERY, **options)
    seen = []
    while not optimizer.finished:
        seen.append(optimizer.training_step)
        loss = loss_of(model, optimizer.training_step, optimizer.training.number)
        loss.backward()
        optimizer.step(metrics={"loss": loss.item()})
        optimizer.zero_grad()
    return model, optimizer, seen


# An optimizer that has no counterpart serves as well.
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam])
def test_a_version_is_what_torch_and_plain_arithmetic_say(wrap, background, kind):
    def make(model):
        return kind(model.parameters(), lr=0.01)

    logged = []
    outer = redisacc.optim.SGD(0.5, momentum=0.5)
    options = {"workers": 2, "outer": outer, "log": lambda step, means: logged.append((step, means))}
    running = [background(train, wrap, make, **options) for _ in range(2)]
    ours = [one.result(50) for one in running]
    assert [seen for _, _, seen in ours] == [list(range(3 * EVERY))] * 2

    crew = [net() for _ in range(2)]
    inner = [make(model) for model in crew]
    weights = [each.detach().numpy().copy() for each in crew[0].parameters()]
    velocity = [np.zeros_like(each) for each in weights]
    for version in range(3):
        moved = []
        for number, model in enumerate(crew):
            with torch.no_grad():
                for parameter, values in zip(model.parameters(), weights, strict=True):
                    parameter.copy_(torch.from_numpy(values))
            for step in range(version * EVERY, (version + 1) * EVERY):
                loss_of(model, step, number).backward()
                inner[number].step()
                inner[number].zero_grad()
            moved.append([w - p.detach().numpy() for w, p in zip(weights, model.parameters(), strict=True)])
        for place, (one, other) in enumerate(zip(*moved, strict=True)):
            velocity[place] = np.float32(0.5) * velocity[place] + (one + other) / np.float32(2)
            weights[place] = weights[place] - np.float32(0.5) * velocity[place]
    for model, _, _ in ours:
        for parameter, values in zip(model.parameters(), weights, strict=True):
            np.testing.assert_allclose(parameter.detach(), values, rtol=1e-5, atol=1e-6)
    assert [step for step, _ in sorted(logged)] == [EVERY - 1, 2 * EVERY - 1, 3 * EVERY - 1]
    assert all(means.keys() == {"loss", "lr"} for _, means in logged)


def test_nothing_is_sent_between_versions(wrap):
    model = net()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss_of(model, 0, 0)
    begin = copy.deepcopy(optimizer.training.latest()[1])
    for _ in range(EVERY - 1):
        loss_of(model, optimizer.training_step, 0).backward()
        optimizer.step()
    assert optimizer.training_step == EVERY - 1
    assert not np.array_equal(model[0].weight.detach(), begin["0.weight"])
    step, weights = optimizer.training.latest()
    assert step == 0
    np.testing.assert_array_equal(weights["0.weight"], begin["0.weight"])
    # A process that begins now has the version, and not the steps alone.
    late = net()
    wrap(late, torch.optim.SGD(late.parameters(), lr=0.1), number=1)
    np.testing.assert_array_equal(late[0].weight.detach(), begin["0.weight"])


def test_the_state_is_that_of_the_process(wrap):
    model = net()
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = wrap(model, inner)
    loss_of(model, 0, 0).backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"][0]["step"] == 1
    optimizer.step()
    optimizer.load_state_dict(saved)
    assert inner.state_dict()["state"][0]["step"] == 1
    # Schedulers of either find the groups.
    assert optimizer.param_groups is inner.param_groups


@pytest.mark.parametrize("option", [{"clip_norm": 1.0}, {"ema": 0.9}, {"sparse": ["0.weight"]}])
def test_options_of_the_update_are_refused(wrap, option):
    model = net()
    with pytest.raises(redisacc.InvalidArgumentError, match=f"{next(iter(option))} must be left out with LocalSteps"):
        wrap(model, torch.optim.SGD(model.parameters()), **option)


def test_an_optimizer_that_needs_a_closure_is_refused(wrap):
    model = net()
    with pytest.raises(redisacc.InvalidArgumentError, match=r"whose step\(\) needs no closure, unlike LBFGS"):
        wrap(model, torch.optim.LBFGS(model.parameters()))


def test_a_gradient_with_nan_moves_nothing(wrap):
    model = net()
    optimizer = wrap(model, torch.optim.SGD(model.parameters()), finite=True)
    (loss_of(model, 0, 0) * torch.nan).backward()
    with pytest.raises(redisacc.NotFiniteError, match=r"the gradient at '0\.weight' must be finite"):
        optimizer.step()
    assert all(bool(torch.isfinite(each).all()) for each in model.parameters())
    optimizer.zero_grad()
    loss_of(model, 0, 0).backward()
    optimizer.step()
    assert optimizer.training_step == 1
