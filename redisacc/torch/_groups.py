"""The numbers of an optimizer's groups in each step, such as learning rates, as they travel with its gradients."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch

from redisacc._arrays.validation import Array
from redisacc.errors import InvalidArgumentError
from redisacc.torch._state import as_bytes

# The leaf of each gradient, beside those of the parameters, that says how a step is made: 1; for each parameter whether
# it has a gradient; the numbers of the groups; a digest of these numbers; and a digest of the weights, which is 0 in
# most steps. Numbers are cut into 16 bits each, so that the mean of equal ones is exact, whatever the weights are.
OPTIONS = "redisacc:options"

_DIGITS, _DIGEST = 4, 4
# How many elements of each gradient are compared: all would have to be copied from a GPU.
_SAMPLE = 16_384
# Numbers that differ by less are equal.
_CLOSE = 0.01
# What else a group has.
_NO_NUMBERS = {"params", "param_names", "initial_lr"}


class _Place(NamedTuple):
    """Where a number is: the number of the group, the option, and the place in it if it is a pair."""

    group: int
    option: str
    at: int | None


class How(NamedTuple):
    """How a step is made.

    Attributes:
        has: whether each parameter has a gradient, in any process.
        numbers: the numbers of the groups.
        clip_norm: the largest norm of the mean gradient; 0: it is not clipped.
        digest: the mean of the digests of the weights.
    """

    has: Sequence[bool]
    numbers: list[float]
    clip_norm: float
    digest: Array

    def differs(self, own: Array) -> bool:
        """Returns whether another process has other weights than this one, given the digest of its own."""
        return bool((np.abs(own - self.digest) >= _CLOSE).any())


class Groups:
    """The numbers of an optimizer's groups. Those that are added later do not count.

    Args:
        groups: the groups.
        count: how many parameters there are.

    Attributes:
        size: the size of the leaf.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], count: int) -> None:
        self._groups, self._count = groups, count
        self._places = [
            _Place(number, option, at)
            for number, group in enumerate(groups)
            for option in sorted(group.keys() - _NO_NUMBERS)
            for at in _places_in(group[option])
        ]
        self.size = 1 + count + _DIGITS * (len(self._places) + 1) + 2 * _DIGEST

    def numbers(self) -> list[float]:
        """Returns the numbers as they are now."""
        every: list[tuple[Any, int | None]] = [(self._groups[group][name], at) for group, name, at in self._places]
        return [float(value if at is None else value[at]) for value, at in every]

    def differing(self, before: Sequence[float], after: Sequence[float]) -> list[int]:
        """Returns the places of the numbers that differ."""
        return [place for place, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]

    def set(self, places: Iterable[int], numbers: Sequence[float]) -> None:
        """Sets the numbers at some places."""
        for place in places:
            number, option, at = self._places[place]
            group, new = self._groups[number], _like(numbers[place], self._groups[number][option], at)
            group[option] = new

    def leaf(self, has: Sequence[bool], clip_norm: float, digest: Array | None) -> Array:
        """Returns the leaf of this process, for whether each parameter has a gradient here."""
        of_weights = np.zeros(_DIGEST) if digest is None else digest
        return np.concatenate([[1.0], np.array(has, np.float64), _digits([*self.numbers(), clip_norm]), of_weights])

    def read(self, leaf: Array, clip_norm: float) -> How | None:
        """Returns how a step is made, given the mean of the leaves; None if all processes have skipped it.

        Raises:
            InvalidArgumentError: the processes disagree. The message names the first number that differs.
        """
        if not leaf[0]:
            return None
        has, mean = leaf[1 : 1 + self._count] > 0, np.nan_to_num(leaf[1 + self._count :] / leaf[0])
        mean, digest = mean[:-_DIGEST], mean[-_DIGEST:]
        bits = np.rint(mean).clip(0, 65535)
        numbers = bits[:-_DIGEST].astype(np.uint16).view(np.float64).tolist()
        if np.abs(mean - bits).max() < _CLOSE and (_digits(numbers) == bits).all():
            return How(has.tolist(), numbers[:-1], numbers[-1], digest)
        own = [*self.numbers(), clip_norm]
        for expected in (_digits(own), bits):
            for place in np.flatnonzero(np.abs(mean - expected)[:-_DIGEST] >= _CLOSE)[:1] // _DIGITS:
                what, value = "the largest norm of the mean gradient", own[place]
                if place < len(self._places):
                    number, option, at = self._places[place]
                    what = f"{option}{'' if at is None else f'[{at}]'} of parameter group {number}"
                raise InvalidArgumentError(
                    f"{what} must be the same in all processes, but is {value!r} here and something else in another "
                    "one: let it depend on nothing but the step, to which optimizer.resume() brings a new scheduler, "
                    "or on a metric of optimizer.training.history(), which is the same for all"
                )
        raise InvalidArgumentError("the options of the step are no numbers of an optimizer")


def _places_in(value: Any) -> list[int | None]:
    """Returns the places of the numbers in an option: [None] if it is one itself."""
    if isinstance(value, (tuple, list)):
        return [*range(len(value))] if all(map(_is_number, value)) else []
    return [None] if _is_number(value) else []


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim == 0)


def _like(number: float, old: Any, at: int | None) -> Any:
    """Returns a number in the form of the option that had another one."""
    if at is not None:
        return type(old)([_like(number, each, None) if n == at else each for n, each in enumerate(old)])
    if isinstance(old, torch.Tensor):
        return torch.full_like(old, number)
    return type(old)(number) if isinstance(old, int) and number.is_integer() else number


def _digits(numbers: Sequence[float]) -> Array:
    """Returns numbers, and a digest of them, 16 bits in each element."""
    array = np.array(numbers, np.float64)
    return np.concatenate([array.view(np.uint16).astype(np.float64), digest_of([torch.from_numpy(array)])])


def digest_of(tensors: Iterable[torch.Tensor]) -> Array:
    """Returns a digest of the bytes of tensors, 16 bits in each element."""
    found = hashlib.blake2b(digest_size=2 * _DIGEST)
    for each in tensors:
        found.update(as_bytes(each).data)
    return np.frombuffer(found.digest(), np.uint16).astype(np.float64)


def digest_text(gradients: Iterable[torch.Tensor | None]) -> str:
    """Returns a digest of the first elements of each gradient, by which equal ones are noticed; "" if all are 0."""
    values = [each._values() if each.is_sparse else each for each in gradients if each is not None]
    first = [each.detach().reshape(-1)[:_SAMPLE] for each in values]
    return bytes(digest_of(first).astype(np.uint16)).hex() if any(bool(each.any()) for each in first) else ""
