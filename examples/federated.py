"""Federated averaging: clients come and go, and train on data that never leaves them.

    pip install 'redisacc[examples]'
    redisacc run --chief --server --workers 8 -- python federated.py

Each of eight clients has images of a few digits only. It is online for some rounds, and then away for a while. In a
round, a client makes several steps of gradient descent on its own images, and sends how far its weights have moved.
The server waits for five clients, whichever they are, and moves the common weights by the mean of these updates,
weighted by the number of images. If fewer clients are left: redisacc set federated least=3
"""

import time

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import redisacc

NAME, ROUNDS, CLIENTS_PER_ROUND, LOCAL_STEPS, RATE, CLASSES = "federated", 60, 5, 20, 0.5, 10


def images():
    """Returns training and test images in [0, 1], each with a constant 1 appended, and the digits that they show."""
    x, y = load_digits(return_X_y=True)
    x = np.hstack([x / 16, np.ones((len(x), 1))])
    return train_test_split(x, y, test_size=0.25, random_state=0, stratify=y)


def own_images(client):
    """Returns what one client has: images of four digits, of some more than of others."""
    x, _, y, _ = images()
    mine = np.isin(y, [(client + offset) % CLASSES for offset in (0, 1, 3, 6)])
    mine &= np.random.default_rng(client).random(len(y)) < 0.2 + 0.1 * (client % 4)
    return x[mine], y[mine]


def trained(weights, x, y):
    """Returns the weights after some steps of gradient descent on a client's images."""
    for _ in range(LOCAL_STEPS):
        logits = x @ weights
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        weights = weights - RATE * x.T @ (p - np.eye(CLASSES)[y]) / len(y)
    return weights


def take_part(client):
    """Runs a client until the training is finished."""
    x, y = own_images(client)
    random = np.random.default_rng()
    while True:
        rounds = int(random.integers(1, 10))
        with redisacc.Worker(NAME) as worker:
            for _, common in worker.steps():
                # "stale" means that five others were faster. The next round begins with their weights.
                worker.apply(trained(common, x, y) - common, weight=len(y))
                rounds -= 1
                if rounds == 0:
                    break
            else:
                return
        time.sleep(random.uniform(0, 0.5))  # away


def serve():
    _, x, _, y = images()
    with redisacc.Chief(NAME, np.zeros((x.shape[1], CLASSES)), quorum=CLIENTS_PER_ROUND) as chief:
        for taken in chief.rounds(until=ROUNDS):
            weights = chief.parameters + taken.gradient
            chief.publish(weights)
            if chief.step % 20 == 0:
                accuracy = np.mean((x @ weights).argmax(axis=1) == y)
                print(f"round {chief.step}: test accuracy {accuracy:.3f}; of {', '.join(taken.workers)}", flush=True)


if __name__ == "__main__":
    here = redisacc.place()
    if here.role == "worker":
        take_part(here.number)
    else:
        serve()
