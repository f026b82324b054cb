"""Classifies handwritten digits by data-parallel logistic regression: each process holds a shard of the images.

    pip install 'redisacc[examples]'
    python digits.py --redis redis://localhost:6379/0 --plot digits.png

At the end it trains once more, in this process alone, and compares the weights.
"""

import argparse
import multiprocessing
import os

import numpy as np
import redis
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import redisacc

CLASSES, RATE, DECAY = 10, 0.5, 1e-4


def images():
    """Returns training and test images in [0, 1], each with a constant 1 appended, and the digits that they show."""
    x, y = load_digits(return_X_y=True)
    x = np.hstack([x / 16, np.ones((len(x), 1))])
    return train_test_split(x, y, test_size=0.25, random_state=0, stratify=y)


def loss_and_gradient(weights, x, y):
    """Returns the cross-entropy, summed over the images, and its gradient."""
    logits = x @ weights
    logits -= logits.max(axis=1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return -log_p[np.arange(len(y)), y].sum(), x.T @ (np.exp(log_p) - np.eye(CLASSES)[y])


def descend(weights, loss, gradient, count):
    """Moves the weights by sums over `count` images; returns the new weights and the mean loss."""
    return weights - RATE * (gradient / count + DECAY * weights), loss / count


def accumulator(client, name, worker):
    """Opens an accumulator of sums, because shards differ in size. Its last row is for the image count and the loss.

    A worker that is started again may compute a gradient that was counted before it died; a round accepts only one.
    """
    shape = [images()[0].shape[1] + 1, CLASSES]
    return redisacc.ConditionalAccumulator(
        np.float64, shape, name, reduction_type="SUM", once_per_worker=True, redis=client, worker=worker
    )


def work(url, name, index, workers, steps):
    """Runs a worker. It reads the weights of each step from a stream, also after it was started again."""
    client = redis.Redis.from_url(url)
    sums = accumulator(client, name, f"worker-{index}")
    x, _, y, _ = images()
    x, y = x[index::workers], y[index::workers]
    seen, step = "0", -1
    while step < steps - 1:
        while not client.xread({f"{name}:weights": seen}, block=1000):
            pass
        [(seen, fields)] = client.xrevrange(f"{name}:weights", count=1)
        step, weights = int(fields[b"step"]), np.frombuffer(fields[b"weights"]).reshape(-1, CLASSES)
        loss, gradient = loss_and_gradient(weights, x, y)
        counts = np.zeros((1, CLASSES))
        counts[0, :2] = len(y), loss
        sums.apply_grad(np.vstack([gradient, counts]), local_step=step)


def train(url, name, workers, steps):
    """Runs the chief, which starts dead workers again."""
    client = redis.Redis.from_url(url)
    sums = accumulator(client, name, "chief")
    context = multiprocessing.get_context("spawn")

    def start(index):
        process = context.Process(target=work, args=(url, name, index, workers, steps), daemon=True)
        process.start()
        return process

    processes = [start(index) for index in range(workers)]
    weights, losses = np.zeros((images()[0].shape[1], CLASSES)), []
    try:
        for step in range(steps):
            client.xadd(f"{name}:weights", {"step": step, "weights": weights.tobytes()}, maxlen=2, approximate=False)
            while True:
                try:
                    total = sums.take_grad(workers, timeout=5)
                    break
                except redisacc.TakeTimeoutError as late:
                    print(late, flush=True)
                    processes = [p if p.is_alive() else start(index) for index, p in enumerate(processes)]
            weights, loss = descend(weights, total[-1, 1], total[:-1], total[-1, 0])
            losses.append(loss)
        return weights, losses
    finally:
        for process in processes:
            process.terminate()
        sums.delete()
        client.delete(f"{name}:weights")


def train_alone(steps):
    """Trains in one process, on all images at once; returns the weights and the losses."""
    x, _, y, _ = images()
    weights, losses = np.zeros((x.shape[1], CLASSES)), []
    for _ in range(steps):
        weights, loss = descend(weights, *loss_and_gradient(weights, x, y), len(y))
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
    parser.add_argument("--redis", default=os.environ.get("REDISACC_URL", "redis://localhost:6379/0"), metavar="URL")
    parser.add_argument("--name", default="digits", help="name of the training")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--plot", metavar="FILE", help="file for a plot of the training")
    args = parser.parse_args()

    together = train(args.redis, args.name, args.workers, args.steps)
    alone = train_alone(args.steps)
    _, x, _, y = images()
    accuracy = np.mean((x @ together[0]).argmax(axis=1) == y)
    difference = np.abs(together[0] - alone[0]).max()
    print(f"test accuracy {accuracy:.3f}; largest difference of a weight from one process: {difference:.1e}")
    if args.plot:
        plot(args.plot, together, alone, accuracy, args.workers)
    if not difference < 1e-12:
        raise SystemExit("the difference is larger than rounding explains")


if __name__ == "__main__":
    main()
