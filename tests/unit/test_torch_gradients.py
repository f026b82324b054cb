"""Gradients of a GPU pass through host memory, while the backward pass goes on. Runs with torch (`make examples`)."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from redisacc.torch._hooks import Hooks  # noqa: E402
from redisacc.torch._upload import Gradients  # noqa: E402


class Training:
    """A training, and its only upload, which note what they are asked to do."""

    shared_name = "torch"

    def __init__(self):
        self.seen = []

    def begin(self):
        self.seen.append("begin")
        return self

    def put(self, name, array):
        self.seen.append((name, set(array.ravel().tolist())))

    def commit(self, *, weight, metrics):
        self.seen.append("commit")

    def abandon(self):
        self.seen.append("abandon")


class Copies:
    """Copies that fill the memory with their number, when somebody waits for them or the next one begins."""

    def __init__(self):
        self.events = []

    def __call__(self, gradient, memory):
        for event in self.events:
            event.synchronize()
        self.events.append(Event(memory, len(self.events)))
        return self.events[-1]


class Event:
    def __init__(self, memory, number):
        self._memory = memory
        self._number = number
        self.is_complete = False

    def query(self):
        return self.is_complete

    def synchronize(self):
        if not self.is_complete:
            self.is_complete = True
            self._memory.fill_(self._number)


def test_a_gradient_is_put_once_its_copy_is_complete():
    """Those of a model on the device "meta" are not in host memory either."""
    model = nn.Sequential(*[nn.Linear(2, 2, bias=False, device="meta") for _ in range(3)])
    tensors = dict(model.named_parameters())
    training, copies = Training(), Copies()
    gradients = Gradients(training, tensors, set(), copies)
    Hooks().after_gradients(tensors, gradients.note)

    def backward():
        training.seen.clear()
        model.zero_grad()
        model(torch.ones(1, 2, device="meta")).sum().backward()

    def put(*numbers):
        return [(f"{2 - number % 3}.weight", {number}) for number in numbers]

    for first in (0, 3):
        backward()
        assert training.seen == ["begin", *put(first, first + 1)]
        gradients.commit(1.0, {})
        assert training.seen == ["begin", *put(first, first + 1, first + 2), "commit", "abandon"]
    # A step that is left out waits for its copies, because the next one uses their memory again.
    backward()
    assert not copies.events[-1].is_complete
    gradients.abandon()
    assert copies.events[-1].is_complete
    assert training.seen == ["begin", *put(6, 7), "abandon"]
    backward()
    gradients.commit(1.0, {})
    assert training.seen == ["begin", *put(9, 10, 11), "commit", "abandon"]
