"""Arguments that are somebody else's objects, which raise while they are read: a typed error with the cause."""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import redisacc

pytestmark = [pytest.mark.servers("fakeredis", "valkey")]


class Gone(Exception):
    """What the objects of this module raise."""


class Raising(Mapping[str, Any]):
    """A mapping of one array, which raises in one of its methods."""

    def __init__(self, method, value=None):
        self.method, self.value = method, np.ones(3, np.float32) if value is None else value

    def _enter(self, method):
        if method == self.method:
            raise Gone

    def __getitem__(self, key):
        self._enter("getitem")
        return self.value

    def __len__(self):
        self._enter("len")
        return 1

    def __iter__(self):
        self._enter("iter")
        yield "a"


class Changing(dict[str, Any]):
    """A dict that another thread changes whenever somebody reads a value."""

    def __getitem__(self, key):
        self[f"{key}x"] = None
        return super().__getitem__(key)


class RaisingList(list[Any]):
    def __iter__(self):
        raise Gone


def closed_file():
    """Returns what numpy makes of an .npz file, after the file was closed."""
    data = io.BytesIO()
    np.savez(data, a=np.ones(3, np.float32))
    data.seek(0)
    file = np.load(data)
    file.close()
    return file


# What raises in the place of a dict with one leaf "a", and the path that the error names.
NODES = {
    "closed .npz": (closed_file, "n/a"),
    "mapping without items": (lambda: Raising("getitem"), "n/a"),
    "mapping without keys": (lambda: Raising("iter"), "n"),
    "mapping that changes": (lambda: Changing(a=np.ones(3, np.float32)), "n"),
    "list": (lambda: RaisingList([1]), "n"),
}
# The same where the structure is known already, so that values are looked up by its keys.
KNOWN_NODES = {
    **{name: node for name, node in NODES.items() if name not in ("mapping that changes", "list")},
    "mapping without length": (lambda: Raising("len"), "n"),
}


def check_refusal(path, act, *args, message="cannot be read"):
    with pytest.raises(redisacc.InvalidArgumentError, match=message) as failure:
        act(*args)
    assert f"'{path}'" in str(failure.value)
    assert failure.value.__cause__ is not None
    assert not isinstance(failure.value.__cause__, redisacc.RedisAccError)
    assert "of their first version" not in str(failure.value)
    assert "was created as something else" not in str(failure.value)
    return failure.value


@pytest.fixture
def open_by(client):
    """Opens parameters and accumulators, which are gone after the test."""
    opened = []

    def open_one(kind, *args):
        opened.append(kind(*args, redis=client))
        return opened[-1]

    yield open_one
    for one in opened:
        one.delete()
        one.close()


def test_a_tree_is_not_published(open_by):
    parameters = open_by(redisacc.Parameters, "p")
    for make, path in NODES.values():
        check_refusal(path, parameters.publish, {"n": make()}, 0)
    assert parameters.step() is None
    parameters.publish({"n": {"a": np.ones(3, np.float32)}}, 0)
    for make, path in KNOWN_NODES.values():
        check_refusal(path, parameters.publish, {"n": make()}, 1)
    assert parameters.step() == 0


def test_a_tree_is_not_applied(open_by):
    acc = open_by(redisacc.TreeAccumulator, {"n": {"a": ("float32", (3,))}}, "t")
    for make, path in KNOWN_NODES.values():
        check_refusal(path, acc.apply_grad, {"n": make()})
    assert acc.num_accumulated() == 0


def test_rows_that_have_changed_are_a_mapping_that_raises(open_by):
    parameters = open_by(redisacc.Parameters, "p")
    parameters.publish({"a": np.ones(3, np.float32)}, 0)
    with pytest.raises(redisacc.InvalidArgumentError, match="changed cannot be read: 'Raising' raised Gone") as failure:
        parameters.publish({"a": np.ones(3, np.float32)}, 1, changed=Raising("getitem"))
    assert isinstance(failure.value.__cause__, Gone)


def test_a_spec_that_raises(client):
    with pytest.raises(redisacc.InvalidArgumentError, match="spec at 'n' cannot be read") as failure:
        redisacc.TreeAccumulator({"n": Raising("iter")}, "t", redis=client)
    assert isinstance(failure.value.__cause__, Gone)
