"""The model: batches, loss, gradients, and the update."""

import hashlib
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from demo_text import SMALL, small_corpus

from redisacc import IndexedSlices
from redisacc.tools.demo.settings import PASSAGE
from redisacc.tools.demo.skipgram import (
    Batch,
    Sampler,
    gradients,
    initial_squares,
    neighbours,
    sum_rows,
    update,
)
from redisacc.tools.demo.text import Corpus

WINDOW = 2


def random_case():
    """Few words and many pairs: centres, contexts and negatives repeat, and negatives hit contexts."""
    generator = np.random.default_rng(11)
    parameters = {
        name: generator.normal(size=(rows, 4)) for name, rows in (("input", 7), ("output", 7), ("position", 2 * WINDOW))
    }
    batch = Batch(
        generator.integers(0, 5, 15),
        generator.integers(0, 4, 15),
        generator.integers(0, 2 * WINDOW, 15),
        np.array([0, 2, 2, 5]),
        0.75,
    )
    return parameters, batch


def slow_loss(parameters, batch):
    """The loss as its definition reads, one pair and one negative at a time."""
    total = 0.0
    for centre, context, place in zip(batch.centres, batch.contexts, batch.places, strict=True):
        hidden = parameters["input"][centre] * parameters["position"][place]
        total += math.log1p(math.exp(-float(hidden @ parameters["output"][context])))
        for negative in batch.negatives:
            if negative != context:
                score = float(hidden @ parameters["output"][negative])
                total += batch.negative_weight * math.log1p(math.exp(score))
    return total


def test_loss():
    parameters, batch = random_case()
    found = gradients(parameters, batch)
    loss, pairs = found["loss"]
    assert loss == pytest.approx(slow_loss(parameters, batch), rel=1e-12)
    assert pairs == 15


def test_gradients_are_those_of_finite_differences():
    parameters, batch = random_case()
    found = gradients(parameters, batch)
    dense = {"position": found["position"]}
    for name in ("input", "output"):
        dense[name] = np.zeros_like(parameters[name])
        dense[name][found[name].indices] = found[name].values
    assert found["input"].indices.tolist() == sorted(set(batch.centres.tolist()))
    assert found["output"].indices.tolist() == sorted({*batch.contexts.tolist(), *batch.negatives.tolist()})
    width = 1e-6
    for name, gradient in dense.items():
        array = parameters[name]
        for where in np.ndindex(array.shape):
            before = array[where]
            array[where] = before + width
            above = slow_loss(parameters, batch)
            array[where] = before - width
            below = slow_loss(parameters, batch)
            array[where] = before
            assert gradient[where] == pytest.approx((above - below) / (2 * width), abs=1e-7), (name, where)


def test_large_scores_stay_finite():
    parameters, batch = random_case()
    parameters["input"][:] *= 1e4
    with np.errstate(all="raise", under="ignore"):
        found = gradients(parameters, batch)
    assert np.isfinite(found["loss"]).all()
    assert np.isfinite(found["position"]).all()


def test_sum_rows():
    rows = np.array([[1.0, 10], [2, 20], [4, 40], [8, 80]])
    indices, sums, counts = sum_rows(np.array([5, 2, 5, 9]), rows)
    assert indices.tolist() == [2, 5, 9]
    assert sums.tolist() == [[2, 20], [5, 50], [8, 80]]
    assert counts.tolist() == [1, 2, 1]


def test_adagrad():
    parameters = {name: np.ones((rows, 1), "f4") for name, rows in (("input", 3), ("output", 3), ("position", 1))}
    squares = initial_squares(parameters)
    gradient = {
        "input": IndexedSlices(np.array([[2.0]], "f4"), np.array([1])),
        "output": IndexedSlices(np.zeros((0, 1), "f4"), np.zeros(0, np.int64)),
        "position": np.array([[-1.0]], "f4"),
        "loss": np.array([3.0, 4.0]),
    }
    for _ in range(2):
        update(parameters, squares, gradient, 0.5)
    # Squares start at 0.1: 4.1, then 8.1; for the dense one 1.1, then 2.1.
    moved = 1 - 0.5 * 2 / math.sqrt(4.1) - 0.5 * 2 / math.sqrt(8.1)
    assert parameters["input"][:, 0].tolist() == pytest.approx([1, moved, 1], rel=1e-6)
    assert parameters["output"].tolist() == [[1], [1], [1]]
    expected = 1 + 0.5 / math.sqrt(1.1) + 0.5 / math.sqrt(2.1)
    assert float(parameters["position"][0, 0]) == pytest.approx(expected, rel=1e-6)
    assert parameters["loss"].tolist() == [3, 4]
    assert {array.dtype for array in (*squares.values(), parameters["input"])} == {np.dtype("f4")}


def test_neighbours():
    vectors = np.array([[1, 0], [10, 1], [0, 1], [-1, 0], [0, 0]], "f4")
    assert neighbours(vectors, 0, 3) == [1, 2, 4]
    assert sorted(neighbours(vectors, 0, 99)) == [1, 2, 3, 4]


# Batches


def sampler(corpus, **changes):
    return Sampler(corpus, replace(SMALL, **({"workers": 3} | changes)))


def fingerprint(batch):
    digest = hashlib.sha256()
    for array in (batch.centres, batch.contexts, batch.places, batch.negatives):
        digest.update(array.astype("<i8").tobytes() + b"|")
    return digest.hexdigest()


def test_a_batch_follows_from_seed_step_and_worker():
    corpus = small_corpus()
    one, other = sampler(corpus), sampler(corpus)
    places = [(step, worker) for step in range(25) for worker in range(3)]
    assert 2 * one.steps_per_epoch < 25, "the steps below must reach into a third epoch"
    found = {place: fingerprint(one.batch(*place)) for place in places}
    # Backwards: nothing may depend on what was drawn before.
    assert {place: fingerprint(other.batch(*place)) for place in reversed(places)} == found
    assert len(set(found.values())) == len(places)
    negatives = {one.batch(*place).negatives.tobytes() for place in places}
    assert len(negatives) == len(places), "two batches share their negatives"
    reseeded = sampler(corpus, seed=4)
    assert fingerprint(reseeded.batch(0, 0)) != found[0, 0]


def counting_corpus(length):
    """Every word is there once: a word's number is its place in the text."""
    return Corpus(np.arange(length), tuple(map(str, range(length))), np.ones(length, np.int64))


def test_pairs_stood_near_each_other():
    corpus = counting_corpus(40 * PASSAGE)
    window = 4
    batches = sampler(corpus, subsampling=1.0, window=window)
    found = Counter[int]()
    for step in range(batches.steps_per_epoch):
        for worker in range(3):
            batch = batches.batch(step, worker)
            distance = batch.contexts - batch.centres
            assert (np.abs(distance) <= window).all()
            assert (distance != 0).all()
            places = np.where(distance > 0, window + distance - 1, window + distance)
            assert batch.places.tolist() == places.tolist()
            found.update(np.abs(distance).tolist())
            pairs = set(zip(batch.centres.tolist(), batch.contexts.tolist(), strict=True))
            assert len(pairs) == len(batch.centres), "a pair came twice"
    # A reach drawn from 1 … 4 holds distance d with probability (5 - d) / 4.
    for distance in (2, 3, 4):
        assert found[distance] / found[1] == pytest.approx((5 - distance) / 4, abs=0.08)


def test_an_epoch_deals_each_passage_to_one_worker():
    corpus = counting_corpus(40 * PASSAGE)
    batches = sampler(corpus, subsampling=1.0, window=1)
    assert batches.steps_per_epoch == 40 // 6
    for epoch in range(2):
        seen = Counter[int]()
        for step in range(batches.steps_per_epoch):
            for worker in range(3):
                seen.update(set(batches.batch(epoch * batches.steps_per_epoch + step, worker).centres.tolist()))
        assert set(seen.values()) == {1}
        assert len(seen) == 36 * PASSAGE


def test_frequent_words_are_thinned_out():
    corpus = small_corpus()
    the = corpus.words.index("the")
    # As in word2vec: sqrt(t/f) + t/f, at most 1.
    ratio = 1e-2 / (corpus.counts / corpus.counts.sum())
    kept = corpus.counts * np.minimum(1, np.sqrt(ratio) + ratio)

    def share_in_batches(subsampling):
        batches = sampler(corpus, subsampling=subsampling)
        centres = np.concatenate([batches.batch(step, 0).centres for step in range(20)])
        return float((centres == the).mean())

    assert corpus.counts[the] / corpus.counts.sum() > 1.4 * kept[the] / kept.sum()
    assert share_in_batches(1.0) == pytest.approx(corpus.counts[the] / corpus.counts.sum(), rel=0.15)
    assert share_in_batches(1e-2) == pytest.approx(kept[the] / kept.sum(), rel=0.15)


def test_tiny_texts_have_batches():
    # One passage, and fewer than the workers want. A text has 60 words or more: 20 different ones, three times each.
    for length in (60, 64, 100):
        for step in range(40):
            batch = sampler(counting_corpus(length), subsampling=1e-3, window=31).batch(step, 2)
            assert len(batch.centres) > 0
            assert batch.negative_weight == 5 / 64


@pytest.mark.slow
def test_negatives_are_drawn_by_count():
    counts = np.array([1000, 100, 10, 1])
    corpus = Corpus(np.repeat(np.arange(4), counts), tuple("abcd"), counts)
    batches = sampler(corpus)
    drawn = np.concatenate([batches.batch(step, worker).negatives for step in range(1000) for worker in range(3)])
    assert len(drawn) == 3000 * 64
    expected = counts**0.75 / (counts**0.75).sum()
    # Five standard deviations of a share of 192,000 draws are below 0.006.
    assert np.bincount(drawn, minlength=4) / len(drawn) == pytest.approx(expected, abs=0.006)
    assert (np.bincount(drawn, minlength=4) > 0).all()
