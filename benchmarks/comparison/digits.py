"""scikit-learn's handwritten digits, and what each of the programs reports."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from benchmarks.comparison import reporting

BATCH = 32
EPOCHS = reporting.EPOCHS
# A multiple of four batches, so that all batches of one, two and four processes are full. The others are for the test.
_TRAINED = 1536


def _arrays() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images / 16).float(), torch.from_numpy(labels)


def digits() -> TensorDataset:
    """Returns the images to train with, and their classes."""
    return TensorDataset(*(each[:_TRAINED] for each in _arrays()))


def report(epoch: int, model: torch.nn.Module) -> None:
    """Prints that an epoch is over; at the end, the accuracy."""

    def accuracy() -> float:
        images, labels = (each[_TRAINED:] for each in _arrays())
        with torch.no_grad():
            return float((model(images).argmax(dim=1) == labels).float().mean())

    reporting.report(epoch, model, accuracy)
