"""The model: batches, loss, gradients, and the update."""

import hashlib
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from demo_text import SMALL, small_corpus

from redisacc.tools.demo.settings import PASSAGE
from redisacc.tools.demo.skipgram import (
    Batch,
    Sampler,
    loss_and_gradient,
)
from redisacc.tools.demo.text import Corpus

WINDOW = 2


def random_case():
    """Few words and many pairs: centers, contexts and negatives repeat, and negatives hit contexts."""
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
    for center, context, place in zip(batch.centers, batch.contexts, batch.places, strict=True):
        hidden = parameters["input"][center] * parameters["position"][place]
        total += math.log1p(math.exp(-float(hidden @ parameters["output"][context])))
        for negative in batch.negatives:
            if negative != context:
                score = float(hidden @ parameters["output"][negative])
                total += batch.negative_weight * math.log1p(math.exp(score))
    return total


def test_the_loss_and_its_gradients_which_are_those_of_finite_differences():
    parameters, batch = random_case()
    loss, found = loss_and_gradient(parameters, batch)
    assert loss == pytest.approx(slow_loss(parameters, batch), rel=1e-12)
    dense = {"position": found["position"]}
    for name in ("input", "output"):
        dense[name] = np.zeros_like(parameters[name])
        dense[name][found[name].indices] = found[name].values
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
        loss, found = loss_and_gradient(parameters, batch)
    assert np.isfinite(loss)
    assert np.isfinite(found["position"]).all()


# Batches


def sampler(corpus, **changes):
    return Sampler(corpus, replace(SMALL, **({"workers": 3} | changes)))


def fingerprint(batch):
    digest = hashlib.sha256()
    for array in (batch.centers, batch.contexts, batch.places, batch.negatives):
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


def test_an_epoch_deals_each_passage_to_one_worker():
    corpus = counting_corpus(40 * PASSAGE)
    batches = sampler(corpus, subsampling=1.0, window=1)
    assert batches.steps_per_epoch == 40 // 6
    for epoch in range(2):
        seen = Counter[int]()
        for step in range(batches.steps_per_epoch):
            for worker in range(3):
                seen.update(set(batches.batch(epoch * batches.steps_per_epoch + step, worker).centers.tolist()))
        assert set(seen.values()) == {1}
        assert len(seen) == 36 * PASSAGE


def test_tiny_texts_have_batches():
    # One passage, and fewer than the workers want. A text has 60 words or more: 20 different ones, three times each.
    for length in (60, 64, 100):
        for step in range(40):
            batch = sampler(counting_corpus(length), subsampling=1e-3, window=31).batch(step, 2)
            assert len(batch.centers) > 0
            assert batch.negative_weight == 5 / 64
