"""Measures what encodings cost: the error of gradients, and the loss that a training reaches with them.

    pip install 'redisacc[examples]'
    python encodings.py

Two models are trained with each encoding: a perceptron with one hidden layer on handwritten digits, and the word
vectors of `redisacc demo`. Four workers take turns in this process. Everything passes through a server all the same.
"""

import argparse

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import redisacc
from redisacc.embedded import Server
from redisacc.tools.demo import skipgram
from redisacc.tools.demo.settings import Settings
from redisacc.tools.demo.text import build_corpus, read_text

WORKERS = 4
# The settings that are compared: how gradients travel, how parameters travel, and whether workers feed errors back.
WAYS = [
    ("float32", "float32", False),
    ("bfloat16", "float32", False),
    ("bfloat16", "bfloat16", False),
    ("int8", "float32", False),
    ("int8", "bfloat16", False),
    ("int8", "float32", True),
]


class Digits:
    """A perceptron with 256 hidden units, trained by plain gradient descent."""

    name, steps, sparse, feeds_back = "digits", 300, (), True

    def __init__(self, steps):
        self.steps = steps or self.steps
        x, y = load_digits(return_X_y=True)
        x = (x / 16).astype(np.float32)
        self.x, self.test_x, self.y, self.test_y = train_test_split(x, y, test_size=0.25, random_state=0, stratify=y)

    def begin(self):
        random = np.random.default_rng(0)
        sizes = {"w1": (64, 256), "w2": (256, 10)}
        weights = {leaf: random.normal(0, shape[0] ** -0.5, shape).astype(np.float32) for leaf, shape in sizes.items()}
        return weights | {"b1": np.zeros(256, np.float32), "b2": np.zeros(10, np.float32)}

    def _forward(self, weights, x):
        hidden = np.maximum(x @ weights["w1"] + weights["b1"], 0)
        logits = hidden @ weights["w2"] + weights["b2"]
        logits -= logits.max(axis=1, keepdims=True)
        return hidden, logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    def gradient(self, weights, step, worker):
        chosen = np.random.default_rng([step, worker]).choice(len(self.x), 64, replace=False)
        x, y = self.x[chosen], self.y[chosen]
        hidden, log_p = self._forward(weights, x)
        d_logits = (np.exp(log_p) - np.eye(10, dtype=np.float32)[y]) / np.float32(len(y))
        d_hidden = d_logits @ weights["w2"].T * (hidden > 0)
        return {"w1": x.T @ d_hidden, "b1": d_hidden.sum(0), "w2": hidden.T @ d_logits, "b2": d_logits.sum(0)}

    def update(self, weights, mean):
        for leaf, values in mean.items():
            weights[leaf] -= np.float32(0.2) * values

    def result(self, weights):
        _, log_p = self._forward(weights, self.x)
        right = (self._forward(weights, self.test_x)[1].argmax(axis=1) == self.test_y).mean()
        return f"{-log_p[np.arange(len(self.y)), self.y].mean():.4f} | {right:.1%} of the test digits"


class Words:
    """The demo's model: two tables of which gradients hold rows, and a small array, trained by Adagrad."""

    name, sparse, feeds_back = "words", skipgram.SPARSE, False

    def __init__(self, steps):
        self.settings = Settings(workers=WORKERS)
        self.steps = steps or self.settings.steps
        self.corpus = build_corpus(read_text(), self.settings.vocabulary)
        self.sampler = skipgram.Sampler(self.corpus, self.settings)

    def begin(self):
        weights = skipgram.initial_parameters(self.corpus, self.settings)
        self.squares = skipgram.initial_squares(weights)
        self.losses = []
        return weights

    def gradient(self, weights, step, worker):
        batch = self.sampler.batch(step, worker)
        loss, gradient = skipgram.loss_and_gradient(weights, batch)
        self.losses.append((loss, len(batch.centers)))
        return gradient

    def update(self, weights, mean):
        skipgram.update(weights, self.squares, mean, self.settings.rate)

    def result(self, weights):  # noqa: ARG002 - the losses of the batches are enough
        total = np.sum(self.losses[-len(self.losses) // 10 :], axis=0)
        return f"{total[0] / total[1]:.4f} | mean of the last tenth of the steps"


def relative_error(sent, given):
    """Returns the length of the vector of errors, divided by that of the gradient."""
    sent, given = (
        [getattr(tree[leaf], "values", tree[leaf]).astype(float) for leaf in given] for tree in (sent, given)
    )
    errors = sum(np.sum((a - b) ** 2) for a, b in zip(sent, given, strict=True))
    return float(np.sqrt(errors / sum(np.sum(b**2) for b in given)))


def train(model, gradients_as, parameters_as, feeds_back, url):
    """Trains a model; returns a line of the table."""
    weights = model.begin()
    memory = [{leaf: np.zeros_like(values) for leaf, values in weights.items()} for _ in range(WORKERS)]
    errors, size = [], 0
    mean_of = {"mean": redisacc.Mean(rows="index"), "sparse": model.sparse}
    with (
        redisacc.TreeAccumulator.like(
            weights, redis=url, encoding=gradients_as, limits=redisacc.Limits(in_place=0), **mean_of
        ) as acc,
        redisacc.Parameters(model.name, redis=url, encoding=parameters_as) as published,
    ):
        for step in range(model.steps):
            published.publish(weights, step)
            _, seen = published.latest()
            for worker in range(WORKERS):
                gradient = model.gradient(seen, step, worker)
                if feeds_back:
                    gradient = {leaf: values + memory[worker][leaf] for leaf, values in gradient.items()}
                sent = acc.as_encoded(gradient)
                if feeds_back:
                    memory[worker] = {leaf: values - sent[leaf] for leaf, values in gradient.items()}
                errors.append(relative_error(sent, gradient))
                acc.apply_grad(gradient, local_step=step)
            size += acc.info().buffered_bytes
            model.update(weights, acc.take_grad(WORKERS))
        published.delete()
    bytes_each = size / model.steps / WORKERS
    error = f"{np.median(errors):.2%}" if any(errors) else "none"
    feedback = ", error feedback" if feeds_back else ""
    return (
        f"{gradients_as}{feedback} | {parameters_as} | {bytes_each / 1000:.1f} kB | {error} | {model.result(weights)}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="number of steps, instead of each model's own")
    args = parser.parse_args()
    print("| model | gradients as | parameters as | a gradient | error of a gradient | loss | |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with Server() as server:
        for model in (Digits(args.steps), Words(args.steps)):
            for gradients_as, parameters_as, feeds_back in WAYS:
                if model.feeds_back or not feeds_back:
                    print(f"| {model.name} | {train(model, gradients_as, parameters_as, feeds_back, server.url)} |")


if __name__ == "__main__":
    main()
