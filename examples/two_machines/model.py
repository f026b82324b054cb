"""A network with one hidden layer, in numpy, that tells two intertwined spirals apart. Chief and workers import it."""

import numpy as np

STEPS, BATCH, HIDDEN, RATE, MOMENTUM = 400, 64, 64, 0.1, 0.9


def points(random, count):
    """Returns points of both spirals, and for each point whether it belongs to the second."""
    t, second = random.uniform(0.1, 1, count), random.integers(2, size=count)
    angle = 10 * t + np.pi * second
    noise = random.normal(scale=0.02, size=(count, 2))
    return 3 * (t[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1) + noise), second


def batch(step, number):
    """Returns the share of worker `number` of the batch of a step: also after a restart the same."""
    return points(np.random.default_rng([step, number]), BATCH)


def begin():
    """Returns the parameters and the optimizer's state of step 0."""
    random = np.random.default_rng(0)
    parameters = {
        "hidden/w": random.normal(size=(2, HIDDEN)),
        "hidden/b": random.normal(size=HIDDEN),
        "out/w": random.normal(size=HIDDEN) / HIDDEN**0.5,
        "out/b": np.zeros(()),
    }
    return parameters, {name: np.zeros_like(array) for name, array in parameters.items()}


def forward(parameters, x):
    hidden = np.tanh(x @ parameters["hidden/w"] + parameters["hidden/b"])
    return hidden, hidden @ parameters["out/w"] + parameters["out/b"]


def gradient(parameters, x, second):
    """Returns the gradient of the mean cross-entropy."""
    hidden, logits = forward(parameters, x)
    error = (1 / (1 + np.exp(-logits)) - second) / len(x)
    back = error[:, None] * parameters["out/w"] * (1 - hidden**2)
    return {"hidden/w": x.T @ back, "hidden/b": back.sum(axis=0), "out/w": hidden.T @ error, "out/b": error.sum()}


def update(parameters, velocity, gradient):
    """Makes a step of gradient descent with momentum; returns new parameters and a new state."""
    velocity = {name: MOMENTUM * velocity[name] + gradient[name] for name in parameters}
    return {name: parameters[name] - RATE * velocity[name] for name in parameters}, velocity


def accuracy(parameters):
    """Returns the accuracy on points that no worker has."""
    x, second = points(np.random.default_rng(0), 2000)
    return np.mean((forward(parameters, x)[1] > 0) == second)
