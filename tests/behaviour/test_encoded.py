"""Gradients of float32 that travel as bfloat16 or int8: the result is exactly the sum of what was sent."""

import functools

import numpy as np
import pytest
from support.model import encoded
from support.servers import contents

import redisacc


def gradients(number, shape, seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 3)).astype(np.float32) for _ in range(number)]


@pytest.mark.parametrize("encoding", ["bfloat16", "int8"])
def test_more_than_is_decoded_at_once(open_dense, encoding):
    acc, given = open_dense("float32", [9, 70_000], encoding=encoding, reduction_type="SUM"), gradients(2, [9, 70_000])
    for gradient in given:
        acc.apply_grad(gradient)
    expected = encoded(given[0], encoding) + encoded(given[1], encoding)
    np.testing.assert_array_equal(acc.peek().gradient, expected, strict=True)
    np.testing.assert_array_equal(acc.take_grad(2), expected, strict=True)


def test_what_is_not_finite(open_dense, open_sparse, open_tree, client):
    """bfloat16 carries it. int8 refuses it before anything changes, whether the gradient would be encoded or not."""
    values = np.ones(600, np.float32)
    values[[3, 500]] = np.nan, -np.inf
    for limits in (redisacc.Limits(in_place=0), redisacc.Limits(in_place=10**9)):
        rounded = open_dense("float32", [600], limits=limits, encoding="bfloat16")
        rounded.apply_grad(values)
        np.testing.assert_array_equal(rounded.take_grad(1), values)
        dense = open_dense("float32", [600], limits=limits, encoding="int8")
        rows = open_sparse("float32", [9, 600], limits=limits, encoding="int8")
        tree = open_tree({"a": ("float32", (5,)), "b": [("float32", (600,))]}, limits=limits, encoding="int8")
        before = contents(client)
        for call, what in (
            (functools.partial(dense.apply_grad, values), "grad must"),
            (functools.partial(rows.apply_grad, [7], values[None]), "grad_values must"),
            (functools.partial(tree.apply_grad, {"a": values[:5], "b": [values]}), "grad at 'a' must"),
            (functools.partial(tree.apply_grad, {"a": None, "b": [values]}), "grad at 'b/0' must"),
        ):
            with pytest.raises(redisacc.InvalidArgumentError, match=f"{what} be finite for encoding='int8', .* nan"):
                call()
        assert contents(client) == before


def test_what_cannot_be_encoded(open_dense):
    for dtype in ("float64", "int32", "complex64", "float16"):
        with pytest.raises(redisacc.InvalidArgumentError, match=f"only float32 is encoded.* are {dtype}"):
            open_dense(dtype, [3], "w", encoding="bfloat16")
        acc = open_dense(dtype, [3], "w", encoding=dtype)
        acc.apply_grad([1, 2, 3])
        acc.delete()


@pytest.mark.parametrize("encoding", ["bfloat16", "int8"])
def test_the_caller_may_write_to_the_gradient_before_it_is_sent_again(proxy, open_dense, client, until, encoding):
    """A gradient is encoded once: however often it is sent, the bytes are the same."""
    limits = redisacc.Limits(in_place=0, inline=0)
    acc = open_dense("float32", [40_000], "w", redis=proxy.where, limits=limits, encoding=encoding)
    (gradient,) = gradients(1, [40_000])
    given_one = gradient.copy()

    def write():
        gradient[:] = 0
        # At the first attempt, the server misses a part, and asks for it again.
        client.delete(*until(lambda: list(client.scan_iter("redisacc:{w}:part:*"))))
        proxy.before("commit", proxy.cut_all)

    proxy.before("commit", write)
    acc.apply_grad(gradient)
    assert not gradient.any()
    assert proxy.sent.count("commit") >= 3
    np.testing.assert_array_equal(acc.take_grad(1), encoded(given_one, encoding))


def test_what_is_sent_can_be_known_beforehand(open_dense, client):
    """Nothing is sent for it. The state machine compares the values."""
    acc = open_dense("float32", [5, 100], limits=redisacc.Limits(in_place=0), encoding="int8")
    (values,) = gradients(1, [5, 100])
    before = contents(client)
    found = acc.as_encoded(values)
    assert contents(client) == before
    np.testing.assert_array_equal(found, encoded(values, "int8"))
    found += 0
    with pytest.raises(redisacc.InvalidArgumentError, match=r"declared shape \[5,100\]"):
        acc.as_encoded(values[0])
