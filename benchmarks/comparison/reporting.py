"""The report of each program of the comparison."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

EPOCHS = int(os.environ.get("COMPARISON_EPOCHS", "10"))


def report(epoch: int, model: torch.nn.Module, accuracy: Callable[[], float]) -> None:
    """Prints that an epoch is over, when, in which process, and the digest of the weights; at the end, the accuracy.

    The weights at the end go to the file that COMPARISON_WEIGHTS names, if it does.
    """
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    print("epoch", epoch, time.monotonic(), os.getpid(), hashlib.sha256(weights).hexdigest()[:12], flush=True)
    if epoch == EPOCHS - 1:
        print("accuracy", accuracy(), flush=True)
        if "COMPARISON_WEIGHTS" in os.environ:
            Path(os.environ["COMPARISON_WEIGHTS"]).write_bytes(weights)
