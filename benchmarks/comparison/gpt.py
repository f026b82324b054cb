"""A small GPT that predicts the next byte of this project's manual, and what each of its programs needs."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.comparison import reporting

BATCH = int(os.environ.get("COMPARISON_BATCH", "8"))
EPOCHS = reporting.EPOCHS
_LENGTH, _WIDTH, _LAYERS, _HEADS = 64, 256, 4, 4
# A multiple of four batches of an epoch's steps; the examples after these are for the test.
_TRAINED, _TESTED = 256, 64
_DOCS = Path(__file__).parents[2] / "docs"


def _examples() -> tuple[torch.Tensor, torch.Tensor]:
    data = b"".join(page.read_bytes() for page in sorted(_DOCS.glob("guides/*.md")))
    every = torch.frombuffer(bytearray(data), dtype=torch.uint8)[: (_TRAINED + _TESTED) * _LENGTH + 1].long()
    return every[:-1].view(-1, _LENGTH), every[1:].view(-1, _LENGTH)


def text() -> TensorDataset:
    """Returns pieces of text to train with, and the bytes that follow."""
    return TensorDataset(*(each[:_TRAINED] for each in _examples()))


class GPT(nn.Module):
    """3.2 million parameters, 13 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, _WIDTH), nn.Embedding(_LENGTH, _WIDTH)
        layer = nn.TransformerEncoderLayer(
            _WIDTH, _HEADS, 4 * _WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, bias=False
        )
        self.layers = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, 256, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(_LENGTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the logits of each next byte."""
        hidden = self.tokens(tokens) + self.places.weight
        return self.head(self.layers(hidden, mask=self.mask, is_causal=True))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Returns AdamW, or torch's optimizer that COMPARISON_OPTIMIZER names. Only matrices decay."""
    matrices = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 1e-3}]
    return getattr(torch.optim, os.environ.get("COMPARISON_OPTIMIZER", "AdamW"))(groups, lr=3e-4)


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Returns a schedule: eight steps of warm-up, then a cosine that ends at the same rate for both groups."""
    schedulers = torch.optim.lr_scheduler
    warm_up = schedulers.LinearLR(optimizer, 0.1, total_iters=8)
    cosine = schedulers.CosineAnnealingLR(optimizer, 120, eta_min=1e-5)
    return schedulers.SequentialLR(optimizer, [warm_up, cosine], [8])


def precision() -> torch.autocast:
    """Returns bfloat16 autocast, off where COMPARISON_FLOAT32 is set."""
    return torch.autocast("cpu", torch.bfloat16, enabled="COMPARISON_FLOAT32" not in os.environ)


def report(epoch: int, model: nn.Module) -> None:
    """Prints that an epoch is over; at the end, how many of the next bytes of the test are predicted."""

    def accuracy() -> float:
        tokens, following = (each[_TRAINED:] for each in _examples())
        with torch.no_grad():
            return float((model(tokens).argmax(dim=-1) == following).float().mean())

    reporting.report(epoch, model, accuracy)
