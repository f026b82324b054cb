"""What programs do with a model, an optimizer and their data counts, or is refused with cause and remedy."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from networks import Net, batch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import redisacc

pytestmark = [pytest.mark.servers("valkey"), pytest.mark.timeout(60)]

SGD = torch.optim.SGD
BOTH = pytest.mark.parametrize("fused", [True, False], ids=["fused", "mean"])


def seeded(make, seed):
    """Returns a module with weights of their own, whichever thread makes it."""
    model = make()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) / 4)
    return model


def sgd(model):
    return SGD(model.parameters(), lr=0.1)


def train(optimizer, model, until, *, after=lambda: None):
    while optimizer.training_step < until:
        x, y = batch(optimizer.training_step, optimizer.training.number or 0)
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        after()


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


class Counting:
    """An optimizer of torch alone, with the loop of the others."""

    def __init__(self, inner):
        self._inner, self.training_step = inner, 0
        self.training = type("", (), {"number": 0})

    def step(self):
        self._inner.step()
        self.training_step += 1

    def zero_grad(self):
        self._inner.zero_grad()


def alone(model, inner, until, after=lambda: None):
    train(Counting(inner), model, until, after=after)
    return model


@BOTH
@pytest.mark.parametrize("how", ["load_state_dict", "data"])
def test_weights_that_are_loaded_after_wrapping_are_what_a_new_training_begins_with(
    wrap, fused, background, caplog, how
):
    pretrained = seeded(Net, 7)

    def load(model):
        if how == "load_state_dict":
            model.load_state_dict(pretrained.state_dict())
        else:
            for into, given in zip(model.parameters(), pretrained.parameters(), strict=True):
                into.data = given.data.clone()

    def run(number):
        model = seeded(Net, number)
        optimizer = wrap(model, sgd(model), workers=2, number=number, fused=fused)
        if number == 0:
            load(model)
        train(optimizer, model, 2)
        return model

    one, other = [each.result(30) for each in [background(run, number) for number in (0, 1)]]
    assert equal(one, other)
    expected = copy.deepcopy(pretrained)
    inner = sgd(expected)
    for step in range(2):
        for number in (0, 1):
            x, y = batch(step, number)
            (cross_entropy(expected(x), y) / 2).backward()
        inner.step()
        inner.zero_grad()
    for ours, theirs in zip(one.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    # A process that is started again runs the same lines.
    again = seeded(Net, 5)
    optimizer = wrap(again, sgd(again), workers=2, fused=fused)
    load(again)
    assert "its own weights count" not in caplog.text
    again(batch(0, 0)[0])
    assert "parameter 'words.weight'. The run is at step 2, so its own weights count" in caplog.text
    assert equal(again, one)
    assert optimizer.training_step == 2


@BOTH
@pytest.mark.parametrize("how", ["data", "in place"])
def test_weights_that_are_changed_after_each_step_are_refused(wrap, fused, how):
    model = Net()

    def clamp():
        for each in model.parameters():
            if how == "data":
                each.data.clamp_(-0.01, 0.01)
            else:
                with torch.no_grad():
                    each.clamp_(-0.01, 0.01)

    optimizer = wrap(model, sgd(model), fused=fused)
    with pytest.raises(
        redisacc.InvalidArgumentError, match=r"parameter '.*' was changed .*call load_weights\(\) in all"
    ):
        train(optimizer, model, 3, after=clamp)
    assert optimizer.training_step == 1


def test_one_changed_element_of_many_parameters_is_found_in_turn(wrap):
    model = nn.Sequential(*[nn.Linear(150, 150) for _ in range(8)])
    optimizer = wrap(model, SGD(model.parameters(), lr=0.01))

    def run():
        for _ in range(9):
            model(torch.ones(1, 150)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model[0].weight.data[149, 149] += 1

    with pytest.raises(redisacc.InvalidArgumentError, match=r"parameter '0\.weight' was changed"):
        run()
    assert optimizer.training_step == 2


@BOTH
def test_load_weights_publishes_those_of_worker_0(wrap, fused, background):
    def run(number):
        model = seeded(Net, number)
        optimizer = wrap(model, torch.optim.AdamW(model.parameters()), workers=2, number=number, fused=fused)
        train(optimizer, model, 2)
        with torch.no_grad():
            model.out.bias.fill_(9.0 + number)
        optimizer.load_weights()
        loaded = optimizer.training_step, model.out.bias.tolist()
        train(optimizer, model, 5)
        return loaded, model, len(optimizer.state_dict()["state"]), optimizer.training_step

    running = [background(run, number) for number in (0, 1)]
    (one, first, states, step), (other, second, _, _) = [each.result(50) for each in running]
    assert one == other == (3, [9.0] * 3)
    assert equal(first, second)
    assert (states, step) == (7 if fused else 5, 5)


class Partly(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 1)
        self.register_buffer("noise", torch.randn(4, dtype=torch.bfloat16))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.out(self.norm(self.frozen(x)) + self.noise)


@BOTH
@pytest.mark.parametrize("given", ["all", "trained"])
def test_frozen_layers_and_buffers_begin_with_those_of_worker_0(wrap, fused, background, given):
    first = seeded(Partly, 0)
    begun = copy.deepcopy(first)

    def run(number):
        model = seeded(Partly, number) if number else first
        parameters = [each for each in model.parameters() if given == "all" or each.requires_grad]
        optimizer = wrap(model, SGD(parameters, lr=0.1), workers=2, number=number, fused=fused)
        if number == 0:
            with pytest.raises(redisacc.InvalidArgumentError, match=r"call it after a step\(\)"):
                optimizer.sync_buffers()
        for step in range(2):
            model(torch.randn(5, 3, generator=torch.Generator().manual_seed(2 * step + number))).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        apart = model.norm.running_mean.clone()
        optimizer.sync_buffers()
        return apart, model, optimizer

    (apart, one, _), (_, other, optimizer) = [each.result(30) for each in [background(run, n) for n in (0, 1)]]
    assert torch.equal(one.frozen.weight, begun.frozen.weight)
    assert torch.equal(one.noise, begun.noise)
    assert torch.equal(one.norm.running_mean, apart)
    assert equal(one, other)
    # A process that is started again.
    optimizer.close()
    again = seeded(Partly, 9)
    parameters = [each for each in again.parameters() if given == "all" or each.requires_grad]
    wrap(again, SGD(parameters, lr=0.1), workers=2, fused=fused)
    assert equal(again, one)


def test_a_new_run_after_a_deleted_one_does_not_get_its_buffers(wrap, caplog):
    for seed, name in ((0, "deleted"), (1, "deleted")):
        model = seeded(Partly, seed)
        mine = copy.deepcopy(model)
        optimizer = wrap(model, SGD(model.out.parameters(), lr=0.1), name=name)
        model(torch.ones(2, 3))
        assert torch.equal(model.noise, mine.noise)
        assert torch.equal(model.frozen.weight, mine.frozen.weight)
        redisacc.Parameters(name, redis=optimizer.training._redis).delete()
        optimizer.close()


def test_a_layer_that_is_frozen_later_is_refused_by_name(wrap):
    """As long as its weights are updated where the sum is."""
    model = Net()
    optimizer = wrap(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    train(optimizer, model, 3)
    model.inner.requires_grad_(False)
    before = model.inner.weight.clone()
    with pytest.raises(
        redisacc.InvalidArgumentError, match=r"'inner\.weight' no longer has requires_grad=True.*, or give fused=False"
    ):
        train(optimizer, model, 5)
    assert torch.equal(model.inner.weight, before)


def test_a_loader_with_another_batch_size_is_an_error_in_the_first_epoch(wrap):
    data = TensorDataset(torch.randn(64, 2))
    model = nn.Linear(2, 1)
    optimizer = wrap(model, sgd(model))
    with pytest.raises(redisacc.InvalidArgumentError, match=r"batch_size is 8, .*, call the optimizer's skip\(\)"):
        epoch(optimizer, model, DataLoader(data, 4, sampler=optimizer.sampler(data, 8)))
    assert optimizer.training_step == 2


def epoch(optimizer, model, loader):
    for [x] in loader:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_loader_with_a_larger_batch_is_an_error_when_the_epoch_ends(wrap):
    data = TensorDataset(torch.randn(64, 2))
    model = nn.Linear(2, 1)
    optimizer = wrap(model, sgd(model))
    loader = DataLoader(data, 16, sampler=optimizer.sampler(data, 8))
    epoch(optimizer, model, loader)
    with pytest.raises(redisacc.InvalidArgumentError, match=r"batch_size is 8, .*, call the optimizer's skip\(\)"):
        epoch(optimizer, model, loader)


def test_rates_that_differ_are_an_error_at_the_first_difference(wrap, background):
    def run(number):
        model = nn.Linear(1, 1, bias=False)
        inner = SGD(model.parameters(), lr=0.1)
        optimizer = wrap(model, inner, workers=2, number=number)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(inner, patience=0)
        # Worker 1 sees a loss that grows.
        for step in range(6):
            model(torch.ones(1, 1)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(10.0 + (step if number else -step))

    running = [background(run, number) for number in (0, 1)]
    caught = []
    for each in running:
        with pytest.raises(redisacc.InvalidArgumentError) as error:
            each.result(30)
        caught.append(str(error.value))
    assert all("of step 2 must be the same in all processes, but is between 0.01 and 0.1" in text for text in caught)
    assert "ReduceLROnPlateau" in caught[0]


@BOTH
def test_a_nan_that_is_refused_and_caught_ends_no_run(wrap, fused, background):
    def run(number):
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        options = {"accumulator": {"finite": True}}
        optimizer = wrap(
            model, SGD(model.parameters(), lr=1.0), workers=2, number=number, until=4, fused=fused, **options
        )
        caught = 0
        while not optimizer.finished:
            optimizer.zero_grad()
            is_nan = number == 1 and optimizer.training_step == 1 and not caught
            (model(torch.ones(1, 1)) * (np.nan if is_nan else 1.0)).sum().backward()
            try:
                optimizer.step()
            except redisacc.NotFiniteError:
                caught += 1
                continue
        return caught, model.weight.item()

    assert [each.result(30) for each in [background(run, n) for n in (0, 1)]] == [(0, -4.0), (1, -4.0)]


@BOTH
def test_a_process_that_skips_leaves_the_mean_to_the_others(wrap, fused, background):
    def run(number):
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = wrap(model, SGD(model.parameters(), lr=1.0), workers=2, number=number, fused=fused)
        for step in range(3):
            (model(torch.ones(1, 1)) * (number + 1)).sum().backward()
            if number == 1 and step == 1:
                optimizer.skip()
            elif number == 1 and step == 2:
                optimizer.step(weight=0)
            else:
                optimizer.step()
            optimizer.zero_grad()
        return model.weight.item()

    assert [each.result(30) for each in [background(run, n) for n in (0, 1)]] == [-3.5, -3.5]


def test_a_batch_that_is_left_out_without_skip_is_noticed(wrap, caplog):
    model = Net()
    optimizer = wrap(model, sgd(model))
    train(optimizer, model, 2)
    assert "zero_grad()" not in caplog.text
    for _ in range(2):
        cross_entropy(model(batch(2, 0)[0]), batch(2, 0)[1]).backward()
        optimizer.zero_grad()
    assert caplog.text.count("drops the gradients of step 2, which no step() has used") == 1
    assert "call skip() instead" in caplog.text


@BOTH
def test_the_state_is_read_by_torch_without_a_step(wrap, fused):
    model = Net()
    inner = torch.optim.Adam(model.parameters())
    optimizer = wrap(model, inner, fused=fused)
    for steps in (0, 2):
        train(optimizer, model, steps)
        weights = [each.clone() for each in model.parameters()]
        found = get_optimizer_state_dict(model, optimizer)
        assert ("out.bias" in found["state"]) == (steps > 0)
        assert optimizer.training_step == steps
        assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


def test_handles_on_a_training_say_why_they_cannot_be_pickled(real_client):
    weights = {"w": np.zeros(1, np.float32)}
    options = {"optimizer": redisacc.optim.SGD(0.1), "workers": 1, "redis": real_client}
    with (
        redisacc.Training("pickled", weights, **options) as training,
        redisacc.Worker("pickled", redis=real_client) as worker,
    ):
        for handle in (training, worker):
            for copied in (pickle.dumps, copy.deepcopy):
                with pytest.raises(
                    TypeError, match=r"cannot be pickled or copied, .* Open it by its name in the other"
                ):
                    copied(handle)


def test_total_steps_are_those_of_whole_epochs(wrap):
    model = Net()
    optimizer = wrap(model, sgd(model), workers=3)
    with pytest.raises(redisacc.InvalidArgumentError, match=r"call sampler\(\) before it"):
        optimizer.total_steps(2)
    sampler = optimizer.sampler(range(50), 4)
    # 100 examples, 12 in each step.
    assert optimizer.total_steps(2) == 9 == sampler.steps(1).stop
