"""What a training consists of. The command publishes it, and every process reads it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

# Number of consecutive words that stay together in a batch. Longer passages lose fewer pairs at their ends, shorter
# ones mix better.
PASSAGE = 32


def _setting(default: float, low: float, high: float, text: str = "") -> Any:
    return field(default=default, metadata={"low": low, "high": high, "help": text})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a training. Those with a help text are options of the command.

    Whole numbers are in [low, high], others in (low, high]. That is checked, because processes get them through Redis.

    Raises:
        ValueError: a value has the wrong type or is out of range.
    """

    steps: int = _setting(1, 1, 2**40)
    workers: int = _setting(4, 1, 256, "Number of workers.")
    dim: int = _setting(48, 1, 4096, "Length of a word vector.")
    seed: int = _setting(1, 0, 2**63 - 1, "Seed of all random numbers.")
    batch: int = _setting(256, PASSAGE, 2**20, "Words of text per worker and step.")
    vocabulary: int = _setting(3000, 20, 2**22, "Number of words to learn, the most frequent ones.")
    window: int = _setting(4, 1, PASSAGE - 1, "Number of context words on either side of a word.")
    negatives: int = _setting(5, 1, 64, "Number of negative samples per pair.")
    rate: float = _setting(0.15, 0, 100, "Learning rate of Adagrad.")
    subsampling: float = _setting(1e-3, 0, 1, "Share of the text above which a word is thinned out.")
    kill: bool = _setting(True, False, True, "Kill the chief and a worker once, to show that nothing is lost.")

    def __post_init__(self) -> None:
        for each in fields(self):
            value, low, high = getattr(self, each.name), each.metadata["low"], each.metadata["high"]
            if type(value).__name__ != each.type:
                raise ValueError(f"{each.name} must be of type {each.type}, not {value!r:.100}")
            # As a condition that holds, because NaN is neither below nor above a bound.
            if not (low < value <= high if each.type == "float" else low <= value <= high):
                raise ValueError(f"{each.name} must be from {low} to {high}, not {value}")
