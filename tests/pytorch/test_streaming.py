"""Gradients leave during the backward pass, and count as they are in step()."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import redisacc.torch
from redisacc._training.upload import Upload
from redisacc.torch import _upload

pytestmark = [pytest.mark.servers("valkey"), pytest.mark.timeout(60)]


class Large(nn.Module):
    """Gradients that are cut into parts: 2 MB."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(360, 360, bias=False) for _ in range(4)])
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.05, generator=random)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def loss_of(model, step=0):
    return model(torch.rand(8, 360, generator=torch.Generator().manual_seed(step))).square().mean() * 100


@pytest.fixture
def seen(monkeypatch):
    """What is done with uploads, in order."""
    found = []
    for name in ("put", "commit", "abandon"):
        method = getattr(Upload, name)

        def called(self, *arguments, method=method, name=name, **options):
            if not (name == "abandon" and self._has_ended):
                found.append((name, *arguments[:1]))
            return method(self, *arguments, **options)

        monkeypatch.setattr(Upload, name, called)
    return found


@pytest.fixture
def optimizer(real_client):
    model = Large()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with redisacc.torch.Optimizer(inner, "torch", model, workers=1, redis=real_client) as found:
        found.model = model
        yield found


def alone(steps, change=lambda model, step: None):
    """Trains in torch alone, without momentum: torch's bits are those of the kernel."""
    model = Large()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        loss_of(model, step).backward()
        change(model, step)
        inner.step()
        inner.zero_grad()
    return model


def assert_equal(ours, theirs):
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


PUTS = [("put", f"layers.{number}.weight") for number in (3, 2, 1, 0)]


def test_gradients_leave_in_the_order_of_the_backward_pass(optimizer, seen):
    for step in range(3):
        loss_of(optimizer.model, step).backward()
        assert seen == PUTS
        optimizer.step()
        assert seen == [*PUTS, ("commit",)]
        seen.clear()
        optimizer.zero_grad()
    assert_equal(optimizer.model, alone(3))


def clip(model, step):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def twice(model, step):
    loss_of(model, step + 10).backward()


@pytest.mark.parametrize(
    ("change", "advice"),
    [(clip, "Instead of clipping them, give clip_norm="), (twice, "Accumulate all but the last under no_sync()")],
)
def test_a_gradient_that_changes_after_it_was_sent_counts_as_it_is_in_the_end(optimizer, seen, change, advice, caplog):
    for step in range(3):
        loss_of(optimizer.model, step).backward()
        change(optimizer.model, step)
        optimizer.step()
        optimizer.zero_grad()
    # Only once: from then on, everything is sent at the end.
    assert seen == [*PUTS, ("abandon",)]
    assert caplog.text.count(advice) == 1
    assert_equal(optimizer.model, alone(3, change))


def test_accumulation_sends_sums_with_the_last_batch(optimizer, seen):
    with optimizer.no_sync():
        loss_of(optimizer.model, 10).backward()
    assert seen == []
    loss_of(optimizer.model, 0).backward()
    assert seen == PUTS
    optimizer.step()
    assert seen == [*PUTS, ("commit",)]
    assert_equal(optimizer.model, alone(1, twice))


@pytest.mark.parametrize("by", ["optimizer", "model"])
def test_a_step_that_is_left_out_leaves_nothing_behind(optimizer, seen, by):
    loss_of(optimizer.model, 5).backward()
    (optimizer if by == "optimizer" else optimizer.model).zero_grad()
    assert seen == [*PUTS, *[("abandon",)] * (by == "optimizer")]
    loss_of(optimizer.model, 0).backward()
    optimizer.step()
    assert seen == [*PUTS, ("abandon",), *PUTS, ("commit",)]
    assert_equal(optimizer.model, alone(1))


def test_parameters_without_a_gradient_are_put_in_step(optimizer, seen):
    x = torch.rand(8, 360, generator=torch.Generator().manual_seed(0))
    optimizer.model.layers[1](x).square().mean().backward()
    before = [each.detach().clone() for each in optimizer.model.parameters()]
    optimizer.step()
    assert seen[0] == PUTS[2]
    assert sorted(seen[1:4]) == sorted([PUTS[0], PUTS[1], PUTS[3]])
    moved = [not torch.equal(a, b) for a, b in zip(before, optimizer.model.parameters(), strict=True)]
    assert moved == [False, True, False, False]


def test_gradients_of_a_gpu_pass_through_host_memory(optimizer, seen, monkeypatch):
    """Here they come from host memory as well, and each copy is complete only when the next one begins."""
    monkeypatch.setattr(_upload, "is_elsewhere", lambda tensor: True)

    class Event:
        def __init__(self):
            self.is_complete = False

        def query(self):
            return self.is_complete

        def synchronize(self):
            self.is_complete = True

    events = []
    begin = _upload.Staging.begin

    def late(staging, name, gradient):
        begin(staging, name, gradient)
        for event in events:
            event.is_complete = True
        events.append(Event())
        staging._begun[-1] = (*staging._begun[-1][:2], events[-1])

    monkeypatch.setattr(_upload.Staging, "begin", late)
    for step in range(3):
        loss_of(optimizer.model, step).backward()
        assert seen == PUTS[:-1]
        optimizer.step()
        assert seen == [*PUTS, ("commit",)]
        seen.clear()
        optimizer.zero_grad()
    assert_equal(optimizer.model, alone(3))
    assert np.isfinite(optimizer.model.layers[0].weight.detach().numpy()).all()


def test_a_closed_optimizer_leaves_the_model_alone(optimizer):
    optimizer.close()
    loss_of(optimizer.model).backward()
    assert optimizer.model.layers[0].weight.grad is not None
