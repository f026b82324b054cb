"""The optimizers of redisacc.optim are those of optax that docs/guides/jax.md puts next to them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.local_updates import LocalTraining

from redisacc._training.local_steps import LocalModel
from redisacc.optim import SGD, Adagrad, Adam, AdamW, Lion, RMSprop

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, warmup_steps=3, decay_steps=20)
NO_BIAS = {"b": False, "w": True}

# Those of the table: optax's, and ours.
PAIRS = {
    "sgd": (optax.sgd(0.1), SGD(0.1)),
    "momentum": (optax.sgd(0.1, momentum=0.9), SGD(0.1, momentum=0.9)),
    "nesterov": (optax.sgd(0.1, momentum=0.9, nesterov=True), SGD(0.1, momentum=0.9, nesterov=True)),
    "adam": (optax.adam(0.01), Adam(0.01)),
    "adam b1 b2": (optax.adam(0.01, b1=0.8, b2=0.95, eps=1e-6), Adam(0.01, betas=(0.8, 0.95), eps=1e-6)),
    "adamw": (optax.adamw(0.01), AdamW(0.01, weight_decay=1e-4)),
    "adagrad": (
        optax.adagrad(0.1, initial_accumulator_value=0.1, eps=1e-10),
        Adagrad(0.1, initial_accumulator_value=0.1, eps=1e-10),
    ),
    "rmsprop": (optax.rmsprop(0.01, decay=0.9, eps_in_sqrt=False), RMSprop(0.01, alpha=0.9, eps=1e-8)),
    "rmsprop centered": (
        optax.rmsprop(0.01, decay=0.9, eps_in_sqrt=False, centered=True, momentum=0.5),
        RMSprop(0.01, alpha=0.9, eps=1e-8, centered=True, momentum=0.5),
    ),
    "lion": (optax.lion(0.01), Lion(0.01, weight_decay=1e-3)),
    "schedule": (optax.adam(SCHEDULE), Adam(lambda step: float(SCHEDULE(step)))),
    "mask": (optax.adamw(0.01, weight_decay=0.1, mask=NO_BIAS), AdamW(0.01, weight_decay=0.1, no_decay=["b"])),
    "clip": (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), SGD(0.1, clip_norm=1.0)),
    "decayed weights": (optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)), SGD(0.1, weight_decay=0.1)),
}
START = {"b": np.linspace(-1, 1, 5, dtype=np.float32), "w": np.linspace(-2, 2, 35, dtype=np.float32).reshape(5, 7)}


def gradient(step, weights):
    """A gradient of which some are small, and the norm is sometimes above 1 and sometimes below."""
    random = np.random.default_rng(step)
    scale = np.float32(10.0 ** (step % 3 - 2))
    return {
        name: np.asarray(values) * scale + scale * random.standard_normal(values.shape, np.float32)
        for name, values in sorted(weights.items())
    }


@pytest.mark.parametrize("name", PAIRS)
def test_twenty_steps_are_the_same(name):
    theirs, ours = PAIRS[name]
    weights = jax.tree.map(jnp.asarray, START)
    state = theirs.init(weights)
    model = LocalModel(ours, START)
    model.set(START)
    for step in range(20):
        change = gradient(step, weights)
        updates, state = theirs.update(change, state, weights)
        weights = optax.apply_updates(weights, updates)
        model.update(change, step, {})
        for leaf, values in model.weights.items():
            np.testing.assert_allclose(values, weights[leaf], rtol=2e-5, atol=1e-5)
    assert abs(model.weights["w"] - START["w"]).max() > 0.01


def test_the_average_is_an_incremental_update():
    training = LocalTraining(SGD(0.1, ema=0.9), START, gradient=lambda _, step, weights: gradient(step, weights))
    average = START
    for step in range(1, 6):
        weights = training.train(step).parameters
        average = optax.incremental_update(weights, average, step_size=1 - 0.9)
    for leaf, values in training.state["ema"].items():
        np.testing.assert_allclose(values, average[leaf], rtol=1e-6)


def test_the_table_has_what_is_compared():
    from pages import DOCS

    page = DOCS / "guides" / "jax.md"
    for of_optax in ("sgd", "adam", "adamw", "adagrad", "rmsprop", "lion", "clip_by_global_norm", "incremental_update"):
        assert re.search(rf"^\| `[^|]*\b{of_optax}\(", page.read_text(), re.MULTILINE), of_optax
