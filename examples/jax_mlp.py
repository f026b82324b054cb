"""Trains a network of two hidden layers, written in JAX, in several processes. Its parameters are a pytree.

    pip install 'redisacc[examples]' jax
    redisacc run --chief --server --workers 3 -- python jax_mlp.py

The images are scikit-learn's handwritten digits. The optimizer's momentum survives a restart of the chief together with
the parameters.
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
def update(parameters, velocity, gradient):
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradient)
    return jax.tree.map(lambda p, v: p - RATE * v, parameters, velocity), velocity


def work():
    x, _, y, _ = images()
    gradient = jax.jit(jax.grad(loss))
    with redisacc.Worker(NAME) as worker:
        for step, parameters in worker.steps():
            # Each worker draws images of its own, also after a restart the same.
            chosen = np.random.default_rng([step, worker.number]).integers(len(x), size=BATCH)
            worker.apply(gradient(parameters, x[chosen], y[chosen]))


def lead():
    parameters = begin()
    velocity = jax.tree.map(jnp.zeros_like, parameters)
    _, x, _, y = images()
    with redisacc.Chief(NAME, parameters, state=velocity) as chief:
        for taken in chief.rounds(until=STEPS):
            parameters, velocity = update(chief.parameters, chief.state, taken.gradient)
            chief.publish(parameters, state=velocity)
            if chief.step % 100 == 0:
                accuracy = jnp.mean(logits(parameters, x).argmax(axis=1) == y)
                print(f"step {chief.step}: test accuracy {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    if redisacc.place().role == "worker":
        work()
    else:
        lead()
