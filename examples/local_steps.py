"""Trains a network with a five-hundredth of the traffic: workers train alone, then exchange the difference.

    pip install 'redisacc[examples]'
    redisacc run --server --workers 2 -- python local_steps.py
    redisacc run --server --workers 2 -- python local_steps.py --every-step

The images are scikit-learn's handwritten digits, moved and dimmed at random. The second command trains the same network
with a gradient in every step. Each prints the loss, and what went through a server that is new.
"""

import argparse
import os

# The matrices are small, and there are many processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import redis
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import redisacc

NAME, STEPS, EVERY, BATCH, HIDDEN = "local-steps", 10_000, 500, 64, 512
INNER = redisacc.optim.AdamW(lambda step: 1e-3 * (1 - step / STEPS), weight_decay=0.01)
# The paper's momentum of 0.9 is for hundreds of versions. Here are twenty.
OUTER = redisacc.optim.SGD(0.9, momentum=0.5, nesterov=True)


def images():
    """Returns training and test images in [0, 1], and the digits that they show."""
    x, y = load_digits(return_X_y=True)
    return train_test_split(x.astype(np.float32) / 16, y, test_size=0.25, random_state=0, stratify=y)


def begin():
    random = np.random.default_rng(0)
    sizes = {"hidden": (64, HIDDEN), "out": (HIDDEN, 10)}
    return {
        name: {
            "w": (random.standard_normal(size) * (2 / size[0]) ** 0.5).astype(np.float32),
            "b": np.zeros(size[1], np.float32),
        }
        for name, size in sizes.items()
    }


def loss_and_gradient(weights, x, y):
    """Returns the mean cross-entropy of some images, its gradient, and the accuracy."""
    hidden = np.maximum(x @ weights["hidden"]["w"] + weights["hidden"]["b"], 0)
    logits = hidden @ weights["out"]["w"] + weights["out"]["b"]
    logits -= logits.max(axis=1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    rows = np.arange(len(y))
    error = np.exp(log_p)
    error[rows, y] -= 1
    error /= len(y)
    back = (error @ weights["out"]["w"].T) * (hidden > 0)
    gradient = {
        "hidden": {"w": x.T @ back, "b": back.sum(axis=0)},
        "out": {"w": hidden.T @ error, "b": error.sum(axis=0)},
    }
    return -log_p[rows, y].mean(), gradient, (logits.argmax(axis=1) == y).mean()


def gradient_of(number, step, weights, x, y):
    """Returns the loss and the gradient of a worker, whose images are moved by up to a pixel and dimmed."""
    random = np.random.default_rng([step, number])
    down, right = random.integers(0, 3, size=2)
    pictures = np.pad(x.reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)))[:, down : down + 8, right : right + 8]
    dimmed = pictures.reshape(-1, 64) * random.uniform(0.7, 1.3, (len(x), 1)).astype(np.float32)
    return loss_and_gradient(weights, dimmed, y)[:2]


def traffic():
    """Returns how many bytes the server has received and sent since it was started, all commands included."""
    stats = redis.Redis.from_url(os.environ["REDISACC_URL"]).info("stats")
    return stats["total_net_input_bytes"] + stats["total_net_output_bytes"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every-step", action="store_true", help="send a gradient in every step")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"stop after so many steps (default: {STEPS})")
    args = parser.parse_args()
    x, test_x, y, test_y = images()
    batches = redisacc.data.Batches(len(x), BATCH)
    optimizer = INNER if args.every_step else redisacc.LocalSteps(INNER, EVERY, OUTER)
    with redisacc.Training(NAME, begin(), optimizer=optimizer) as training:
        for step, weights in training.steps(until=args.steps):
            mine = batches.indices(step, training.number, training.workers)
            loss, gradient = gradient_of(training.number, step, weights, x[mine], y[mine])
            training.apply(gradient, metrics={"loss": loss})
        if training.number == 0:
            step, weights = training.latest()
            loss, _, accuracy = loss_and_gradient(weights, test_x, test_y)
            kb = traffic() / step / 1000
            print(f"step {step}: test loss {loss:.3f}, accuracy {accuracy:.3f}; {kb:.2f} kB for each step", flush=True)


if __name__ == "__main__":
    main()
