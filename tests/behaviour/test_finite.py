"""finite=True: a gradient with NaN or an infinity is refused before anything is sent, and its first one is named."""

import functools
import pickle

import numpy as np
import pytest

import redisacc

BAD = [np.nan, np.inf, -np.inf]


def refused(call, message, path, index):
    with pytest.raises(redisacc.NotFiniteError) as raised:
        call()
    assert message in str(raised.value)
    assert (raised.value.path, raised.value.index) == (path, index)
    assert isinstance(raised.value, redisacc.InvalidArgumentError)


def test_dense(open_dense):
    for dtype in ("float16", "bfloat16", "float32", "float64", "complex64", "complex128"):
        acc = open_dense(dtype, [3, 4], finite=True)
        gradient = np.ones((3, 4), acc.dtype)
        assert acc.apply_grad(gradient)
        for bad in BAD:
            gradient[2, 3] = gradient[1, 2] = bad
            refused(functools.partial(acc.apply_grad, gradient), "at [1, 2]: nothing was sent", None, (1, 2))
        assert (acc.info().applied, acc.info().duplicates) == (1, 0)
    acc = open_dense("float64", [], finite=True)
    refused(lambda: acc.apply_grad(np.nan), "but has nan as its only element", None, ())


def test_large_arrays_are_searched_to_the_end(open_dense):
    acc = open_dense("float32", [600_001], finite=True)
    for place in (0, 2**18 - 1, 2**18, 600_000):
        gradient = np.zeros(600_001, np.float32)
        gradient[place] = np.inf
        refused(lambda gradient=gradient: acc.apply_grad(gradient), f"has inf at [{place}]", None, (place,))
        # Every second element, so that it isn't contiguous.
        wide = np.zeros(1_200_002, np.float32)
        wide[2 * place] = np.nan
        refused(lambda wide=wide: acc.apply_grad(wide[::2]), f"has nan at [{place}]", None, (place,))


def test_what_becomes_infinite_on_the_way_is_refused_too(open_dense, open_sparse):
    dense = open_dense("float16", [2], finite=True)
    refused(lambda: dense.apply_grad(np.array([1.0, 1e6])), "has inf at [1]", None, (1,))
    sparse = open_sparse("float32", [None], finite=True)
    refused(lambda: sparse.apply_grad([5, 5], np.float32([3e38, 3e38])), "has inf at [5]", None, (5,))


LARGEST = np.uint32(0x7F7F7FFF).view(np.float32)


@pytest.mark.parametrize("size", [10, 5000], ids=["in place", "buffered"])
def test_what_bfloat16_rounds_to_infinity_is_refused(open_dense, open_sparse, size):
    """Whether it is refused does not depend on how many elements it has."""
    too_large = np.nextafter(LARGEST, np.float32(np.inf))
    dense = open_dense("float32", [size], "SUM", finite=True, encoding="bfloat16")
    gradient = np.zeros(size, np.float32)
    gradient[[3, 4]] = LARGEST, -LARGEST
    assert dense.apply_grad(gradient)
    assert np.isfinite(dense.take_grad(1)).all()
    for bad in (too_large, -too_large, np.float32(np.finfo(np.float32).max)):
        gradient[7] = bad
        refused(
            lambda: dense.apply_grad(gradient, local_step=1),
            f"has {bad} at [7], which encoding='bfloat16' rounds to infinity: nothing was sent",
            None,
            (7,),
        )
    for bad in BAD:
        gradient[7] = bad
        refused(lambda: dense.apply_grad(gradient, local_step=1), f"has {bad} at [7]: nothing", None, (7,))
    gradient[7] = too_large
    sparse = open_sparse("float32", [None, size], finite=True, encoding="bfloat16")
    refused(lambda: sparse.apply_grad([9], [gradient]), "rounds to infinity", None, (9, 7))


def test_sparse(open_sparse):
    acc = open_sparse("float32", [100, 2, 2], "SUM", finite=True)
    rows = np.ones((3, 2, 2))
    assert acc.apply_grad([7, 90, 3], rows)
    rows[0, 1, 0] = np.nan
    # Rows are sorted by index, and the index of a row is what counts, not its place in the argument.
    refused(lambda: acc.apply_grad([7, 90, 3], rows), "grad_values must be finite", None, (7, 1, 0))
    assert acc.apply_grad([], np.empty((0, 2, 2)))
    assert acc.num_accumulated() == 2


def test_tree(open_tree):
    acc = open_tree(
        {
            "a": [("float32", (2, 2)), ("int32", (2,))],
            "e": ("float32", (0,)),
            "s": redisacc.Sparse("float64", (None, 2)),
        },
        finite=True,
    )

    def gradient(a=0.0, s=0.0):
        return {"a": [[[1, 1], [a, 1]], [1, 2]], "e": [], "s": ([4, 2], [[1, 1], [1, s]])}

    assert acc.apply_grad(gradient())
    assert acc.apply_grad({**gradient(), "a": [None, None]})
    refused(lambda: acc.apply_grad(gradient(a=np.inf)), "grad at 'a/0' must be finite", "a/0", (1, 0))
    refused(lambda: acc.apply_grad(gradient(s=np.nan)), "grad at 's' must be finite", "s", (2, 1))
    assert acc.num_accumulated() == 2


def test_a_pickled_handle_and_its_error(open_dense):
    acc = open_dense("float32", [2], "finite", finite=True)
    with pytest.raises(redisacc.NotFiniteError) as raised:
        acc.apply_grad([0.0, np.nan])
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (copy.path, copy.index, str(copy)) == (None, (1,), str(raised.value))
