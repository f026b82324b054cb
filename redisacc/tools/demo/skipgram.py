"""Skip-gram with negative sampling in plain numpy: the parameters, the batches, the loss and its gradients.

The score of word c having word o at relative place k of its window is ``(input[c] * position[k]) · output[o]``.
``input`` and ``output`` have a row for each word, and a batch touches some hundreds of them, so their gradients are
sparse. ``position`` has a row for each place of the window (four words before … four words after), and every batch
touches all of it, so its gradient is dense. It lets the model tell the words before a word from those after it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from redisacc import IndexedSlices
from redisacc.tools.demo.settings import PASSAGE, Settings
from redisacc.tools.demo.text import Corpus, IntArray

Array = npt.NDArray[Any]
Tree = dict[str, Any]

# The leaves of which a gradient holds rows.
SPARSE = ("input", "output")

# The first value of each sum of squares. If it were zero, a gradient that is only a rounding error would move a
# parameter by the full rate.
SQUARES = 0.1

# A seed is split into these sequences, so that no two uses of it draw the same numbers.
_INITIAL, _EPOCH, _BATCH = 0, 1, 2


def initial_parameters(corpus: Corpus, settings: Settings) -> Tree:
    """Returns the parameters that training starts from, the same for the same arguments everywhere.

    Output vectors start at zero and places at one, which is how skip-gram without places starts.
    """
    shape = len(corpus.words), settings.dim
    generator = np.random.default_rng([settings.seed, _INITIAL])
    return {
        "input": ((generator.random(shape) - 0.5) / settings.dim).astype(np.float32),
        "output": np.zeros(shape, np.float32),
        "position": np.ones((2 * settings.window, settings.dim), np.float32),
    }


class Batch(NamedTuple):
    """Pairs of words that are near each other in the text, and the negatives that all pairs of the batch share."""

    centers: IntArray  # [pairs], the first word of each pair
    contexts: IntArray  # [pairs], the second word
    places: IntArray  # [pairs], the place of the second word in the window of the first, in [0, 2 * window)
    negatives: IntArray  # [drawn]
    negative_weight: float  # of one negative; together they count as `negatives` words per pair


class Sampler:
    """Cuts batches from a corpus. A batch depends on (seed, step, worker) and on nothing else.

    So a worker that is started again in the middle computes the same gradient as the one that was killed. Each epoch
    thins out the frequent words again, cuts the rest into passages of 32 words and shuffles these. Each step deals the
    next ``workers * passages`` of them, so that the workers of a step have different text.
    """

    def __init__(self, corpus: Corpus, settings: Settings) -> None:
        self._settings = settings
        self._tokens = corpus.tokens
        # As in word2vec, a word of relative frequency f stays with probability (sqrt(f/t) + 1) · t/f, at most 1. "The"
        # says little about its neighbors, and otherwise most of the work would go into it.
        ratio = corpus.counts / corpus.counts.sum() / settings.subsampling
        self._keep = np.minimum(1.0, (np.sqrt(ratio) + 1.0) / ratio)
        # Negatives are drawn in proportion to count^0.75, that is rare words more often than their share of the text.
        # All pairs of a batch share them: enough of them to replace a draw for each pair.
        self._drawn = max(64, 2 * settings.negatives)
        self._cumulative = np.cumsum(corpus.counts.astype(np.float64) ** 0.75)
        self._passages = max(1, settings.batch // PASSAGE)
        kept = self._keep @ corpus.counts
        self.steps_per_epoch = max(1, int(kept / (settings.workers * self._passages * PASSAGE)))
        self._epoch = -1
        self._rows: IntArray = np.zeros((0, 0), np.int64)

    def batch(self, step: int, worker: int) -> Batch:
        """Returns the batch of ``worker`` (0 … workers - 1) in ``step`` (from 0)."""
        settings = self._settings
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        passages = self._passages_of(epoch)
        first = (step_of_epoch * settings.workers + worker) * self._passages
        # The number of words that an epoch keeps varies a little; if it falls short, some passages come twice.
        rows = passages[np.arange(first, first + self._passages) % len(passages)]
        generator = np.random.default_rng([settings.seed, _BATCH, step, worker])
        # As in word2vec, each center draws the reach of its window, so that nearer words count more.
        reach = generator.integers(1, settings.window + 1, size=rows.shape)
        centers, contexts, places = [], [], []
        for distance in range(1, settings.window + 1):
            left, right = rows[:, :-distance], rows[:, distance:]
            ahead = reach[:, :-distance] >= distance
            behind = reach[:, distance:] >= distance
            centers += [left[ahead], right[behind]]
            contexts += [right[ahead], left[behind]]
            places.append(np.full(int(ahead.sum()), settings.window + distance - 1, np.int64))
            places.append(np.full(int(behind.sum()), settings.window - distance, np.int64))
        drawn = generator.random(self._drawn) * self._cumulative[-1]
        negatives = np.searchsorted(self._cumulative, drawn, side="right").astype(np.int64)
        pairs = [np.concatenate(parts) for parts in (centers, contexts, places)]
        return Batch(pairs[0], pairs[1], pairs[2], negatives, settings.negatives / self._drawn)

    def _passages_of(self, epoch: int) -> IntArray:
        if epoch != self._epoch:
            generator = np.random.default_rng([self._settings.seed, _EPOCH, epoch])
            kept = self._tokens[generator.random(len(self._tokens)) < self._keep[self._tokens]]
            if len(kept) < 2 * PASSAGE:
                kept = self._tokens  # a tiny text is too short to thin out
            # The start differs between epochs, because pairs across a cut that never moves would never be seen.
            kept = kept[int(generator.integers(min(PASSAGE, len(kept) - PASSAGE + 1))) :]
            rows = kept[: len(kept) // PASSAGE * PASSAGE].reshape(-1, PASSAGE)
            self._rows = rows[generator.permutation(len(rows))]
            self._epoch = epoch
        return self._rows


def sum_rows(indices: IntArray, rows: Array) -> tuple[IntArray, Array, IntArray]:
    """Adds the rows that have the same index. Returns the indices, ascending, the sums, and the numbers of rows."""
    order = np.argsort(indices, kind="stable")
    unique, first, counts = np.unique(indices[order], return_index=True, return_counts=True)
    return unique, np.add.reduceat(rows[order], first, axis=0), counts


def loss_and_gradient(parameters: Tree, batch: Batch) -> tuple[float, Tree]:
    """Returns the summed loss of a batch and its gradient, a tree like the parameters.

    The loss is ``sum over pairs of softplus(-s) + weight * sum over negatives of softplus(s)``. A negative that happens
    to be a pair's own context word does not count for that pair.
    """
    center = parameters["input"][batch.centers]
    place = parameters["position"][batch.places]
    hidden = center * place
    context = parameters["output"][batch.contexts]
    negative = parameters["output"][batch.negatives]
    score = np.einsum("ij,ij->i", hidden, context)
    against = hidden @ negative.T
    counts = batch.negatives[None, :] != batch.contexts[:, None]
    weight = np.where(counts, batch.negative_weight, 0.0).astype(hidden.dtype)

    d_score, positive = _sigmoid_and_softplus(-score)
    d_against, negated = _sigmoid_and_softplus(against)
    d_against *= weight
    loss = float(positive.sum(dtype=np.float64) + (weight * negated).sum(dtype=np.float64))

    d_hidden = d_against @ negative - d_score[:, None] * context
    d_output = np.concatenate([-d_score[:, None] * hidden, d_against.T @ hidden])
    input_indices, input_rows, _ = sum_rows(batch.centers, d_hidden * place)
    output_indices, output_rows, _ = sum_rows(np.concatenate([batch.contexts, batch.negatives]), d_output)
    position = np.zeros_like(parameters["position"])
    places, place_rows, _ = sum_rows(batch.places, d_hidden * center)
    position[places] = place_rows
    return loss, {
        "input": IndexedSlices(input_rows, input_indices),
        "output": IndexedSlices(output_rows, output_indices),
        "position": position,
    }


def _sigmoid_and_softplus(score: Array) -> tuple[Array, Array]:
    # From exp(-|score|), which cannot overflow; numpy has fast paths for exp and log, but not for logaddexp and log1p.
    small = np.exp(-np.abs(score))
    sigmoid = np.where(score >= 0, 1, small) / (1 + small)
    return sigmoid, np.maximum(score, 0) + np.log(1 + small)


def initial_squares(parameters: Tree) -> Tree:
    """Returns the first sums of squares for Adagrad."""
    return {leaf: np.full_like(parameters[leaf], SQUARES) for leaf in (*SPARSE, "position")}


def update(parameters: Tree, squares: Tree, gradient: Tree, rate: float) -> None:
    """Updates parameters in place by Adagrad: an element's step shrinks as the squares of its gradients add up."""
    for leaf, sums in squares.items():
        found = gradient[leaf]
        where, values = (found.indices, found.values) if leaf in SPARSE else (slice(None), found)
        sums[where] += values * values
        parameters[leaf][where] -= np.float32(rate) * values / np.sqrt(sums[where])


def neighbors(vectors: Array, word: int, number: int) -> list[int]:
    """Returns the ``number`` words whose vectors have the largest cosine with that of ``word``, best first."""
    vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    likeness = vectors @ vectors[word]
    likeness[word] = -np.inf
    return list(map(int, np.argsort(-likeness, kind="stable")[: min(number, len(likeness) - 1)]))
