"""Models that are unusual, or that the program changes: trained as torch trains them, or refused with the reason."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from networks import Large, Net, batch, loss_of
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module
from torch.nn.functional import cross_entropy

import redisacc
import redisacc.torch

pytestmark = [pytest.mark.servers("valkey"), pytest.mark.timeout(60)]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def assert_equal(ours, theirs):
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def train(model, optimizer, loss, steps=3):
    for step in range(steps):
        loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def loss_of_words(model, step):
    return cross_entropy(model(batch(step, 0)[0]), batch(step, 0)[1])


class Odd(nn.Module):
    """A number, an array without elements, an image's filter whose channels lie last, and a name to be quoted."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.filter = nn.Conv2d(3, 4, 3)
        self.register_parameter("a/b*[c]", nn.Parameter(torch.ones(3)))
        nn.init.constant_(self.filter.weight, 0.1)
        nn.init.zeros_(self.filter.bias)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.filter(x).square().mean() * self.scale + self.empty.sum() + getattr(self, "a/b*[c]").sum()


def test_parameters_of_any_shape_and_order_in_memory(wrap):
    ours, theirs = Odd(), Odd()
    optimizer, plain = (
        torch.optim.AdamW([{"params": each.filter.parameters()}, {"params": rest(each), "weight_decay": 0.0}], lr=0.1)
        for each in (ours, theirs)
    )
    optimizer = wrap(ours, optimizer)

    def loss(model, step):
        x = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        return model(x.to(memory_format=torch.channels_last))

    train(ours, optimizer, loss)
    train(theirs, plain, loss)
    assert_equal(ours, theirs)
    assert ours.filter.weight.is_contiguous(memory_format=torch.channels_last)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(theirs, plain, loss)
    train(ours, optimizer, loss)
    assert_equal(ours, theirs)


def rest(model):
    return [each for name, each in model.named_parameters() if "filter" not in name]


class Tied(nn.Module):
    """A table whose gradients are rows, and that is also the last layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 4, sparse=True)
        self.out = nn.Linear(4, 20, bias=False)
        nn.init.normal_(self.words.weight, generator=torch.Generator().manual_seed(0))
        self.out.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(words).sum(dim=1))


def test_a_table_with_sparse_gradients_that_a_dense_layer_shares(wrap):
    ours, theirs = Tied(), Tied()
    train(ours, wrap(ours, sgd(ours)), loss_of_words)
    train(theirs, sgd(theirs), loss_of_words)
    assert_equal(ours, theirs)


class Looked(nn.Module):
    """A table that is a parameter of the model itself, so nothing says that its gradients are rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(20, 3, generator=torch.Generator().manual_seed(0)))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(words, self.table, sparse=True).sum(dim=1)


@pytest.mark.parametrize("sparse", [[], ["table"]], ids=["dense", "declared"])
def test_a_table_of_the_model_itself(wrap, sparse):
    ours, theirs = Looked(), Looked()
    optimizer = wrap(ours, sgd(ours), sparse=sparse)
    train(ours, optimizer, loss_of_words)
    train(theirs, sgd(theirs), loss_of_words)
    assert_equal(ours, theirs)
    if sparse:
        with pytest.raises(redisacc.InvalidArgumentError, match="must list parameters of the model, but has 'x'"):
            wrap(ours, sgd(ours), sparse=["x"])


def test_compiled_models(wrap):
    """Names are those of the model that is not compiled, so a process may do without."""
    model = Large()
    run = torch.compile(model, backend="aot_eager")
    train(run, wrap(run, sgd(model)), loss_of)
    plain = Large()
    train(plain, sgd(plain), loss_of)
    assert_equal(model, plain)
    late = Large()
    wrap(late, sgd(late))
    assert_equal(late, plain)


@pytest.fixture
def process_group():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_models_that_torch_distributes_are_refused(wrap):
    with pytest.raises(redisacc.InvalidArgumentError, match="must not be wrapped in DistributedDataParallel"):
        wrap(nn.parallel.DistributedDataParallel(Net()))
    model = distribute_module(nn.Linear(2, 2), init_device_mesh("cpu", (1,)))
    with pytest.raises(redisacc.InvalidArgumentError, match="'weight' is a DTensor, which is spread over several"):
        wrap(model)


def test_parameters_without_values_are_refused(wrap):
    with pytest.raises(redisacc.InvalidArgumentError, match="'weight' must be a dense tensor that has values"):
        wrap(nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match="Call `forward` with a dummy batch to initialize the parameters"):
        wrap(nn.LazyLinear(2))


def test_a_model_that_was_converted_is_refused(wrap):
    model = Net()
    optimizer = wrap(model)
    message = r"'words\.weight' is torch\.float64, but was torch\.float32 .*: convert the model before that"
    loss_of_words(model, 0).backward()
    model.to(torch.float64)
    for call in (optimizer.step, lambda: wrap(model.float(), name="other") and loss_of_words(model.double(), 0)):
        with pytest.raises(redisacc.InvalidArgumentError, match=message):
            call()
    assert optimizer.training.latest()[0] == 0
    # Nothing is wrong with one that is back in time.
    model.to(torch.float32)
    optimizer.zero_grad()
    train(model, optimizer, loss_of_words, 1)
    assert optimizer.training_step == 1


def test_a_step_without_any_gradient_counts_zeros_and_says_so(wrap, caplog):
    ours, theirs = Net(), Net()
    optimizer = wrap(ours, torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1))
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(2):
        optimizer.step()
        for parameter in theirs.parameters():
            parameter.grad = torch.zeros_like(parameter)
        plain.step()
    assert_equal(ours, theirs)
    assert caplog.text.count("Was backward() called, and does the model still have the parameters") == 1


def test_a_model_that_has_new_parameters_says_so(wrap, caplog):
    model = Net()
    optimizer = wrap(model)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    train(model, optimizer, loss_of_words, 1)
    assert "does the model still have the parameters that the optimizer was made with?" in caplog.text


def test_the_optimizer_inside_makes_no_steps_of_its_own(wrap):
    model = Net()
    inner = sgd(model)
    optimizer = wrap(model, inner)
    loss_of_words(model, 0).backward()
    before = copy.deepcopy(model)
    with pytest.raises(
        redisacc.InvalidArgumentError,
        match=r"^call step\(\) of the redisacc\.torch\.Optimizer, and not of the SGD inside",
    ):
        inner.step()
    assert_equal(model, before)
    optimizer.close()
    inner.step()
    assert not torch.equal(model.out.weight, before.out.weight)


def test_an_optimizer_that_is_dropped_leaves_the_training(wrap, real_client):
    """Neither the model nor the optimizer inside keeps it, although both have its hooks."""
    model = Net()
    inner = sgd(model)
    dropped = weakref.ref(redisacc.torch.Optimizer(inner, "torch", model, workers=1, redis=real_client))
    gc.collect()
    assert dropped() is None
    assert real_client.hgetall("redisacc:{torch}:crew") == {}
    assert wrap(Net(), number=0).training_step == 0
    loss_of_words(model, 0).backward()
    inner.step()


def test_a_closed_optimizer_says_that_it_is_closed(wrap):
    model = Net()
    optimizer = wrap(model)
    optimizer.close()
    loss_of_words(model, 0).backward()
    with pytest.raises(redisacc.CancelledError, match="'torch' is closed"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.close()
