"""Gradients leave during the backward pass, and count as they are in step()."""

from __future__ import annotations

import copy
import io
import itertools
import os
import pickle
import signal
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
from redisacc.torch import _upload

pytestmark = [pytest.mark.servers("valkey"), pytest.mark.timeout(60)]

# The requests of a gradient that leaves part by part, and is counted or dropped; and of one that is sent whole.
STREAMED = ["stage", "renew_upload", "commit"]
DROPPED = ["stage", "renew_upload", "UNLINK"]
WHOLE = ["stage", "commit"]

# A gradient has so many parts. Each of the four layers completes two of them, and all are in two more at its borders.
PARTS = range(8)


class Uploads:
    """The requests of uploads that have passed the proxy, and the parts on the server that do not count yet."""

    def __init__(self, proxy, client):
        self._proxy = proxy
        self._client = client

    @property
    def seen(self):
        """The requests, in order, repeated ones once."""
        names = [name for name in self._proxy.sent if name in {*STREAMED, *DROPPED}]
        return [name for name, _ in itertools.groupby(names)]

    @property
    def staged(self):
        """The numbers of the parts."""
        # Those that no round has yet.
        keys = [key for key in self._client.scan_iter("redisacc:{torch}:part:*", 100) if self._client.pttl(key) >= 0]
        return sorted(int(key.rpartition(b":")[2]) for key in keys)

    def arrive(self, parts=PARTS):
        """Waits until these parts are there, and no others."""
        until(lambda: self.staged == list(parts), 10)

    def arrive_in_order(self, model):
        """Has each backward pass wait, after each layer, until the parts of the layers so far are there."""
        for number, layer in enumerate(model.layers):
            parts = PARTS[2 * number :]
            layer.weight.register_post_accumulate_grad_hook(lambda _, parts=parts: self.arrive(parts))

    def forget(self):
        self._proxy.listen_anew()


@pytest.fixture
def optimizer(proxy, wrap, monkeypatch):
    monkeypatch.setattr(_upload, "SHORT_PASS", 0.0)
    model = Large()
    found = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), finite=True, redis=proxy.where)
    # It begins with the first pass.
    model(torch.zeros(1, 360))
    found.model = model
    return found


@pytest.fixture
def uploads(optimizer, proxy, real_client):
    # Who leads removes claims when it begins.
    proxy.listen_anew()
    return Uploads(proxy, real_client)


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


def test_gradients_leave_in_the_order_of_the_backward_pass(optimizer, uploads):
    uploads.arrive_in_order(optimizer.model)
    for step in range(3):
        loss_of(optimizer.model, step).backward()
        assert uploads.seen == STREAMED[:-1]
        optimizer.step()
        assert uploads.seen == STREAMED
        uploads.forget()
        optimizer.zero_grad()
    assert_equal(optimizer.model, alone(3))


def test_after_a_short_pass_gradients_are_sent_at_the_end(optimizer, uploads, monkeypatch):
    for step, (shortest, seen) in enumerate([(60.0, STREAMED), (60.0, WHOLE), (0.0, STREAMED)]):
        monkeypatch.setattr(_upload, "SHORT_PASS", shortest)
        loss_of(optimizer.model, step).backward()
        optimizer.step()
        assert uploads.seen == seen
        uploads.forget()
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
def test_a_gradient_that_changes_after_it_was_sent_counts_as_it_is_in_the_end(
    optimizer, uploads, change, advice, caplog
):
    for step in range(3):
        loss_of(optimizer.model, step).backward()
        if step == 0:
            uploads.arrive()
        change(optimizer.model, step)
        optimizer.step()
        optimizer.zero_grad()
    # Only once: from then on, everything is sent at the end.
    assert uploads.seen == [*DROPPED, *WHOLE * 3]
    assert caplog.text.count(advice) == 1
    assert_equal(optimizer.model, alone(3, change))


def test_a_gradient_that_a_second_pass_replaces_is_sent_again(optimizer, uploads):
    """With a graph of the gradients, torch adds in new memory instead of the old one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.* with create_graph=True")
        for number in (0, 10):
            loss_of(optimizer.model, number).backward(create_graph=True)
            uploads.arrive()
    optimizer.step()
    assert uploads.seen == [*DROPPED, *STREAMED]
    assert_equal(optimizer.model, alone(1, twice))


def test_what_no_sync_has_held_back_is_sent_in_step(optimizer, uploads):
    with optimizer.no_sync():
        for number in (0, 10):
            loss_of(optimizer.model, number).backward()
    with pytest.raises(ZeroDivisionError), optimizer.no_sync():
        raise ZeroDivisionError
    optimizer.step()
    assert uploads.seen == WHOLE
    assert_equal(optimizer.model, alone(1, twice))
    optimizer.zero_grad()
    loss_of(optimizer.model, 1).backward()
    uploads.arrive()


def test_gradients_may_keep_their_memory(optimizer, uploads):
    for step in range(4):
        loss_of(optimizer.model, step).backward()
        optimizer.step()
        (optimizer if step % 2 else optimizer.model).zero_grad(set_to_none=False)
    assert uploads.seen == STREAMED * 4
    assert_equal(optimizer.model, alone(4))


@pytest.mark.parametrize("by", ["optimizer", "model"])
def test_a_step_that_is_left_out_leaves_nothing_behind(optimizer, uploads, by):
    loss_of(optimizer.model, 5).backward()
    uploads.arrive()
    (optimizer if by == "optimizer" else optimizer.model).zero_grad()
    if by == "optimizer":
        assert uploads.seen == DROPPED
        assert uploads.staged == []
    loss_of(optimizer.model, 0).backward()
    optimizer.step()
    assert uploads.seen == [*DROPPED, *STREAMED]
    assert_equal(optimizer.model, alone(1))


def test_parameters_without_a_gradient_are_put_in_step(optimizer, uploads):
    x = torch.rand(8, 360, generator=torch.Generator().manual_seed(0))
    optimizer.model.layers[1](x).square().mean().backward()
    uploads.arrive([2])
    before = [each.detach().clone() for each in optimizer.model.parameters()]
    optimizer.step()
    assert uploads.seen == STREAMED
    moved = [not torch.equal(a, b) for a, b in zip(before, optimizer.model.parameters(), strict=True)]
    assert moved == [False, True, False, False]


@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_may_be_computed_again(optimizer, uploads, reentrant):
    """A part of the model then has a backward pass of its own, within the other one."""

    def loss(model):
        x = torch.rand(8, 360, generator=torch.Generator().manual_seed(0)).requires_grad_()
        for layer in model.layers:
            x = checkpoint(lambda x, layer=layer: torch.relu(layer(x)), x, use_reentrant=reentrant)
        return x.square().mean() * 100

    uploads.arrive_in_order(optimizer.model)
    loss(optimizer.model).backward()
    optimizer.step()
    assert uploads.seen == STREAMED
    assert_equal(optimizer.model, alone(1))


def test_two_threads_may_run_parts_of_a_backward_pass(optimizer, uploads, proxy):
    """As torch does for two devices. Both find that there is no upload, and only one begins it."""
    # An upload begins when the accumulator is open.
    proxy.before("open", lambda: time.sleep(0.1))
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
    assert uploads.seen == STREAMED
    for parameter, before in zip(optimizer.model.parameters(), Large().parameters(), strict=True):
        torch.testing.assert_close(parameter, before - 0.1 * torch.ones(360, 360))


def test_an_interrupt_ends_the_backward_pass_and_leaves_nothing_behind(optimizer, uploads, proxy):
    """It comes while the upload begins, which waits until the accumulator is open."""
    proxy.before("open", lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        loss_of(optimizer.model, 5).backward()
    optimizer.zero_grad()
    loss_of(optimizer.model, 0).backward()
    optimizer.step()
    assert uploads.seen == STREAMED
    assert_equal(optimizer.model, alone(1))


def test_an_error_ends_the_backward_pass_and_leaves_nothing_behind(optimizer, uploads):
    """A gradient in the middle has another dtype by mistake. The two behind it have been sent by then."""
    uploads.arrive_in_order(optimizer.model)
    wrong = optimizer.model.layers[1].weight
    wrong.grad_dtype = None
    wrong.grad = torch.zeros(360, 360, dtype=torch.complex64)
    with pytest.raises(redisacc.InvalidArgumentError, match=r"'layers\.1\.weight' must be"):
        loss_of(optimizer.model, 5).backward()
    assert uploads.seen == DROPPED
    assert uploads.staged == []
    optimizer.zero_grad()
    loss_of(optimizer.model, 0).backward()
    optimizer.step()
    assert uploads.seen == [*DROPPED, *STREAMED]
    assert_equal(optimizer.model, alone(1))


def test_a_backward_pass_that_pauses_for_longer_than_any_expiry_counts_as_it_is(
    optimizer, real_server, real_client, clock
):
    """As in a debugger. By the time that it continues, the parts that were sent are gone, and so are all leases."""
    lost = []

    def staged():
        return {key for key in real_client.scan_iter("*:part:*") if real_client.pttl(key) >= 0}

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


def test_copies_of_the_model_send_nothing(optimizer, uploads):
    file = io.BytesIO()
    torch.save(optimizer.model, file)
    file.seek(0)
    for other in (copy.deepcopy(optimizer.model), torch.load(file, weights_only=False)):
        loss_of(other).backward()
    loss_of(optimizer.model).backward()
    optimizer.step()
    assert uploads.seen == STREAMED
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be pickled or copied, .* save its state_dict\(\)"):
            copied(optimizer)
