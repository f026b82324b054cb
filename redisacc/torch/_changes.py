"""Notices what a program changes in tensors: torch counts most changes, and of the others, bytes tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

# How many elements of a tensor are compared, and how many tensors in each step. Torch does not count changes through
# ``.data``, so the bytes have to be read; a step must not pay for reading all of them.
ELEMENTS, TENSORS = 16_384, 8


class Sample(NamedTuple):
    """A copy of some elements of a tensor, by which a change is noticed that torch does not count.

    Attributes:
        begin: the place of the first of them.
        copy: their bytes.
    """

    begin: int
    copy: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor, turn: int) -> Sample:
        """Takes a sample. Each turn takes other elements of a large tensor."""
        begin = turn * ELEMENTS % max(1, tensor.numel())
        return cls(begin, _bytes(tensor, begin).clone())

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Returns whether the tensor still has these elements."""
        now = _bytes(tensor, self.begin)
        return now.device != self.copy.device or bool(torch.equal(now, self.copy))


def _bytes(tensor: torch.Tensor, begin: int) -> torch.Tensor:
    # Bytes, because NaN is not equal to itself.
    return tensor.detach().reshape(-1)[begin : begin + ELEMENTS].view(torch.uint8)


class Changes:
    """Notices that a program has changed parameters since they were last written.

    Torch counts changes in place, and all are noticed at once. Of changes through ``.data``, which it does not count,
    those of 8 parameters are noticed in each step, which take turns.

    Args:
        tensors: the parameters, by name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._versions: dict[str, int] = {}
        self._samples: dict[str, Sample] = {}
        self._turn = 0

    def note(self) -> None:
        """Notes that the parameters are as they should be."""
        names = [*self._tensors]
        self._versions = {name: tensor._version for name, tensor in self._tensors.items()}
        turns = range(self._turn, self._turn + min(TENSORS, len(names)))
        self._samples = {
            names[turn % len(names)]: Sample.of(self._tensors[names[turn % len(names)]], turn // len(names))
            for turn in turns
        }
        self._turn = turns.stop

    def find(self) -> str | None:
        """Returns the name of a parameter that was changed since, None if there is none."""
        for name, version in self._versions.items():
            tensor = self._tensors[name]
            if tensor._version != version or (name in self._samples and not self._samples[name].is_of(tensor)):
                return name
        return None
