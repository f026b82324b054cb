"""Trains a network of two hidden layers, written in JAX, in several processes. Its parameters are a pytree.

    pip install 'redisacc[examples]' jax
    redisacc run --server --workers 3 -- python jax_mlp.py

The images are scikit-learn's handwritten digits. The process that leads makes the update, and any may lead next: the
optimizer's momentum is published together with the parameters.
"""

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import redisacc

NAME, STEPS, BATCH, SIZES, RATE, MOMENTUM = "jax-mlp", 300, 64, (64, 64, 32, 10), 0.1, 0.9


def images():
    """Returns training and test images in [0, 1], and the digits that they show."""
    x, y = load_digits(return_X_y=True)
    return train_test_split(x.astype(np.float32) / 16, y, test_size=0.25, random_state=0, stratify=y)


def begin():
    """Returns the parameters of step 0: a list with a dict for each layer."""
    keys = jax.random.split(jax.random.key(0), len(SIZES) - 1)
    return [
        {"w": jax.random.normal(key, (inputs, outputs)) * (2 / inputs) ** 0.5, "b": jnp.zeros(outputs)}
        for key, inputs, outputs in zip(keys, SIZES[:-1], SIZES[1:], strict=True)
    ]


def logits(parameters, x):
    *hidden, last = parameters
    for layer in hidden:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


def loss(parameters, x, y):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits(parameters, x)), y[:, None], axis=1).mean()


@jax.jit
def descend(parameters, velocity, gradient):
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradient)
    return jax.tree.map(lambda p, v: p - RATE * v, parameters, velocity), velocity


def main():
    x, test_x, y, test_y = images()
    parameters, gradient = begin(), jax.jit(jax.grad(loss))
    velocity = jax.tree.map(jnp.zeros_like, parameters)

    def update(taken, parameters, velocity):
        return descend(parameters, velocity, taken.gradient)

    with redisacc.Training(NAME, parameters, update=update, state=velocity) as training:
        for step, parameters in training.steps(until=STEPS):
            # Each worker draws images of its own, also after a restart the same.
            chosen = np.random.default_rng([step, training.number]).integers(len(x), size=BATCH)
            training.apply(gradient(parameters, x[chosen], y[chosen]))
        if training.number == 0:
            accuracy = jnp.mean(logits(training.latest()[1], test_x).argmax(axis=1) == test_y)
            print(f"test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
