"""Gradients leave during the backward pass, and count as they are in step()."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import time
import warnings

import pytest
import torch
from networks import Large, loss_of
from support.suspension import suspend
from support.until import until
from torch import nn
from torch.utils.checkpoint import checkpoint

import redisacc
import redisacc.torch
from redisacc._training.training import Training
from redisacc._training.upload import Upload
from redisacc.torch import _optimizer, _upload

pytestmark = [pytest.mark.servers("valkey"), pytest.mark.timeout(60)]


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
def optimizer(wrap):
    model = Large()
    found = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), finite=True)
    found.model = model
    return found


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


def test_a_gradient_that_a_second_pass_replaces_is_sent_again(optimizer, seen, caplog):
    """With a graph of the gradients, torch adds in new memory instead of the old one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.* with create_graph=True")
        for number in (0, 10):
            loss_of(optimizer.model, number).backward(create_graph=True)
    optimizer.step()
    assert seen == [*PUTS, ("abandon",), *PUTS, ("commit",)]
    assert_equal(optimizer.model, alone(1, twice))


def test_accumulation_sends_sums_with_the_last_batch(optimizer, seen):
    with optimizer.no_sync():
        loss_of(optimizer.model, 10).backward()
    assert seen == []
    loss_of(optimizer.model, 0).backward()
    assert seen == PUTS
    optimizer.step()
    assert seen == [*PUTS, ("commit",)]
    assert_equal(optimizer.model, alone(1, twice))


def test_what_no_sync_has_held_back_is_sent_in_step(optimizer, seen):
    with optimizer.no_sync():
        for number in (0, 10):
            loss_of(optimizer.model, number).backward()
    with pytest.raises(ZeroDivisionError), optimizer.no_sync():
        raise ZeroDivisionError
    optimizer.step()
    assert seen == []
    assert_equal(optimizer.model, alone(1, twice))
    optimizer.zero_grad()
    loss_of(optimizer.model, 1).backward()
    assert seen == PUTS


@pytest.mark.parametrize("by", ["optimizer", "model"])
def test_gradients_may_keep_their_memory(optimizer, seen, by):
    for step in range(3):
        loss_of(optimizer.model, step).backward()
        optimizer.step()
        (optimizer if by == "optimizer" else optimizer.model).zero_grad(set_to_none=False)
    assert seen == [*PUTS, ("commit",)] * 3
    assert_equal(optimizer.model, alone(3))


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


@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_may_be_computed_again(optimizer, seen, reentrant):
    """A part of the model then has a backward pass of its own, within the other one."""

    def loss(model):
        x = torch.rand(8, 360, generator=torch.Generator().manual_seed(0)).requires_grad_()
        for layer in model.layers:
            x = checkpoint(lambda x, layer=layer: torch.relu(layer(x)), x, use_reentrant=reentrant)
        return x.square().mean() * 100

    loss(optimizer.model).backward()
    assert seen == PUTS
    optimizer.step()
    assert_equal(optimizer.model, alone(1))


def test_two_threads_may_run_parts_of_a_backward_pass(optimizer, seen, monkeypatch):
    """As torch does for two devices. Both find that there is no upload, and only one begins it."""
    began = []
    begin = Training.begin

    def slow(training):
        time.sleep(0.1)
        began.append(training)
        return begin(training)

    monkeypatch.setattr(Training, "begin", slow)
    halves = [[], []]
    both = threading.Barrier(2)

    def part(of, number):
        layers = optimizer.model.layers[2 * number : 2 * number + 2]
        x = torch.ones(1, 360)
        loss = sum(layer(x).sum() for layer in layers)
        both.wait()
        loss.backward()
        of.extend(layer.weight.grad for layer in layers)

    threads = [threading.Thread(target=part, args=[half, number]) for number, half in enumerate(halves)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    optimizer.step()
    assert len(began) == 1
    assert sorted(seen) == sorted([*PUTS, ("commit",)])
    for parameter, before in zip(optimizer.model.parameters(), Large().parameters(), strict=True):
        torch.testing.assert_close(parameter, before - 0.1 * torch.ones(360, 360))


@pytest.mark.parametrize("at", ["begin", "put"])
def test_an_error_ends_the_backward_pass_and_leaves_nothing_behind(optimizer, seen, monkeypatch, at):
    owner = {"begin": Training, "put": Upload}[at]
    method = getattr(owner, at)

    def fail(self, *arguments):
        if at == "put" and arguments[0] != "layers.1.weight":
            return method(self, *arguments)
        raise redisacc.ServerUnavailableError("no server answers")

    with monkeypatch.context() as broken:
        broken.setattr(owner, at, fail)
        with pytest.raises(redisacc.ServerUnavailableError, match="no server answers"):
            loss_of(optimizer.model, 5).backward()
    assert seen == ([] if at == "begin" else [*PUTS[:2], ("abandon",)])
    seen.clear()
    optimizer.zero_grad()
    loss_of(optimizer.model, 0).backward()
    optimizer.step()
    assert seen == [*PUTS, ("commit",)]
    assert_equal(optimizer.model, alone(1))


def test_a_gradient_with_nan_counts_nowhere(optimizer, seen):
    (loss_of(optimizer.model) * torch.nan).backward()
    with pytest.raises(redisacc.NotFiniteError, match=r"layers\.0\.weight"):
        optimizer.step()
    assert seen == [*PUTS, ("commit",)]
    seen.clear()
    optimizer.zero_grad()
    loss_of(optimizer.model).backward()
    optimizer.step()
    assert seen == [*PUTS, ("commit",)]
    assert_equal(optimizer.model, alone(1))


def test_a_backward_pass_that_pauses_for_longer_than_any_expiry_counts_as_it_is(
    optimizer, real_server, real_client, clock
):
    """As in a debugger. By the time that it continues, the parts that were sent are gone, and so are all leases."""
    lost = []

    def staged():
        return {key for key in real_client.scan_iter() if b":staged:" in key}

    def pause(*_):
        sent = until(staged)
        suspend(clock, real_server.url)
        lost.append(len(sent - staged()))

    for step in range(2):
        hook = optimizer.model.layers[1].register_full_backward_hook(pause)
        loss_of(optimizer.model, step).backward()
        hook.remove()
        optimizer.step()
        optimizer.zero_grad()
    assert len(lost) == 2
    assert all(lost)
    assert_equal(optimizer.model, alone(2))


def test_copies_of_the_model_send_nothing(optimizer, seen):
    file = io.BytesIO()
    torch.save(optimizer.model, file)
    file.seek(0)
    for other in (copy.deepcopy(optimizer.model), torch.load(file, weights_only=False)):
        loss_of(other).backward()
    assert seen == []
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be pickled or copied, .* save its state_dict\(\)"):
            copied(optimizer)


def test_gradients_of_a_gpu_pass_through_host_memory(optimizer, seen, monkeypatch):
    """Here they come from host memory as well, and each copy is complete only when the next one begins."""
    for module in (_upload, _optimizer):
        monkeypatch.setattr(module, "is_elsewhere", lambda tensor: True)

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
    # A step that is left out waits for its copies, because the next one uses their memory again.
    loss_of(optimizer.model, 5).backward()
    assert not events[-1].is_complete
    optimizer.zero_grad()
    assert events[-1].is_complete
    loss_of(optimizer.model, 3).backward()
    optimizer.step()
    assert seen == [*PUTS[:-1], ("abandon",), *PUTS, ("commit",)]
    assert_equal(optimizer.model, alone(4))


def test_a_closed_optimizer_leaves_the_model_alone(optimizer):
    optimizer.close()
    loss_of(optimizer.model).backward()
    assert optimizer.model.layers[0].weight.grad is not None
