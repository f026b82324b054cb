"""Classifies handwritten digits by data-parallel logistic regression: each worker holds a shard of the images.

    pip install 'redisacc[examples]'
    redisacc run --server --workers 4 -- python digits.py --plot digits.png

At the end one process trains once more, alone, and compares the weights.
"""

import argparse

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import redisacc

NAME, CLASSES, RATE, DECAY, STEPS = "digits", 10, 0.5, 1e-4, 200


def images():
    """Returns training and test images in [0, 1], each with a constant 1 appended, and the digits that they show."""
    x, y = load_digits(return_X_y=True)
    x = np.hstack([x / 16, np.ones((len(x), 1))])
    return train_test_split(x, y, test_size=0.25, random_state=0, stratify=y)


def loss_and_gradient(weights, x, y):
    """Returns the mean cross-entropy of the images, and its gradient."""
    logits = x @ weights
    logits -= logits.max(axis=1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return -log_p[np.arange(len(y)), y].mean(), x.T @ (np.exp(log_p) - np.eye(CLASSES)[y]) / len(y)


def train():
    """Returns this worker's number, the weights, and the loss of each step.

    Shards differ in size, so a gradient has the weight of its images, as has its loss.
    """
    x, _, y, _ = images()
    optimizer = redisacc.optim.SGD(RATE, weight_decay=DECAY)
    with redisacc.Training(NAME, np.zeros((x.shape[1], CLASSES)), optimizer=optimizer) as training:
        share = slice(training.number, None, training.workers)
        x, y = x[share], y[share]
        for _, weights in training.steps(until=STEPS):
            loss, gradient = loss_and_gradient(weights, x, y)
            training.apply(gradient, weight=len(y), metrics={"loss": loss})
        losses = [past.metrics["loss"] for past in training.history()]
        return training.number, training.latest()[1], losses


def train_alone():
    """Trains in one process, on all images at once; returns the weights and the losses."""
    x, _, y, _ = images()
    weights, losses = np.zeros((x.shape[1], CLASSES)), []
    for _ in range(STEPS):
        loss, gradient = loss_and_gradient(weights, x, y)
        weights = weights - RATE * (gradient + DECAY * weights)
        losses.append(loss)
    return weights, losses


def plot(path, together, alone, accuracy, workers):
    """Draws the loss of both trainings, and the weights as pictures."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    left.plot(alone[1], color="tab:orange", linewidth=5, alpha=0.5, label="one process")
    left.plot(together[1], color="tab:blue", linewidth=1.5, label=f"{workers} processes")
    left.set(title=f"Test accuracy {accuracy:.1%}", xlabel="step", ylabel="mean cross-entropy")
    left.legend()
    pictures = together[0][:-1].T.reshape(2, 5, 8, 8)
    limit = np.abs(pictures).max()
    right.imshow(pictures.transpose(0, 2, 1, 3).reshape(16, 40), cmap="RdBu_r", vmin=-limit, vmax=limit)
    right.set(title="Weights for 0 to 4 and 5 to 9", xticks=[], yticks=[])
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", metavar="FILE", help="file for a plot of the training")
    args = parser.parse_args()
    number, *together = train()
    if number:
        return

    alone = train_alone()
    _, x, _, y = images()
    accuracy = np.mean((x @ together[0]).argmax(axis=1) == y)
    difference = np.abs(together[0] - alone[0]).max()
    print(f"test accuracy {accuracy:.3f}; largest difference of a weight from one process: {difference:.1e}")
    if args.plot:
        plot(args.plot, together, alone, accuracy, redisacc.place().workers)
    if not difference < 1e-12:
        raise SystemExit("the difference is larger than rounding explains")


if __name__ == "__main__":
    main()
