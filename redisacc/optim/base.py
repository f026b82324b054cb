"""What all optimizers share: options, groups of leaves, the numbers of a step, and the form that travels."""

from __future__ import annotations

import fnmatch
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from redisacc._arrays.metrics import Means, metric_name
from redisacc._arrays.validation import Array, flag, integer
from redisacc._text import shown
from redisacc.errors import InvalidArgumentError
from redisacc.optim.options import factors, number, patterns

Schedule = Callable[[int], float]

# A number, a function of the step, or the name of a metric.
Rate = float | Schedule | str

# The numbers of one step for one group: see the class of the optimizer for what each is.
Scalars = tuple[float, ...]

# The slot of the moving average of the weights.
EMA = "ema"

_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))

# torch.nn.utils.clip_grad_norm_ adds it to the norm.
_CLIP_EPS = 1e-6


class _Group(NamedTuple):
    """What the leaves of a group have in common.

    Attributes:
        decays: whether their weights decay.
        factor: what their learning rate is multiplied by.
    """

    decays: bool
    factor: float


# Makes numbers of the dtype of a leaf.
Number = type[np.floating[Any]]


class Arrays(NamedTuple):
    """What is updated: vectors of one length and dtype.

    Attributes:
        weights: the weights.
        gradient: what moves them.
        state: an array for each slot.
        out: where the new weights go, perhaps the weights.
        to: where the new state goes, perhaps the state.
    """

    weights: Array
    gradient: Array
    state: Sequence[Array]
    out: Array
    to: Sequence[Array]


# Updates a block, with three arrays of scratch memory. The gradient may be the first of them, and must not be written
# to otherwise.
Step = Callable[[Arrays, list[Array]], None]


@dataclass(frozen=True)
class Optimizer(ABC):
    """The base class of optimizers, which are names and numbers, without weights or state.

    It has the options that all optimizers share. Instances do not change, and compare equal if all their options are
    equal.

    Weights and state are float32 or float64. Leaves of other dtypes are refused.

    Sparse leaves, whose gradients are rows, have lazy state, as in torch.optim.SparseAdam: a step touches only the rows
    that are in its gradient. Other rows neither move nor decay, and their momentum and moving averages, also of the
    weights, stay as they are until the row occurs again. Bias corrections count the steps of the run, not of the row.

    Args:
        lr: the learning rate, at least 0; or a function that returns it for a step, which counts from 0. Only the chief
            calls the function. Or the name of a metric, which begins with a letter: each gradient of a step then
            carries the rate as this metric, and all must have the same number.
        weight_decay: at least 0. ``AdamW`` and ``Lion`` multiply the weights by 1 - lr * weight_decay, the others add
            weight_decay * weights to the gradient.
        maximize: follow the gradient uphill.
        no_decay: patterns of paths of leaves whose weights do not decay, for example ``["*/bias"]``. A pattern is one
            of ``fnmatch``, in which ``*`` also matches slashes, and upper and lower case differ.
        lr_factor: patterns of paths → the factor of these leaves' learning rate. The first pattern that matches counts,
            in the order of the dict. Leaves without a match have the factor 1.
        clip_norm: the largest norm of the mean of all leaves together; above it, the mean is multiplied by
            clip_norm / (norm + 1e-6), as ``torch.nn.utils.clip_grad_norm_`` does. None means not clipped.
        ema: keep an exponential moving average of the weights with this decay, in [0, 1), in the slot "ema". It begins
            with the weights before the first update, and each update adds (1 - ema) * (weights - average), as
            torch.optim.swa_utils.get_ema_multi_avg_fn does. None means no average.

    Raises:
        InvalidArgumentError: an option is out of range.
    """

    name: ClassVar[str]

    lr: Rate
    _: KW_ONLY
    weight_decay: float = 0.0
    maximize: bool = False
    no_decay: Sequence[str] = ()
    lr_factor: Mapping[str, float] = field(default_factory=dict, hash=False)
    clip_norm: float | None = None
    ema: float | None = None

    def __post_init__(self) -> None:
        self._set(
            lr=_rate(self.lr),
            weight_decay=number(self.weight_decay, "weight_decay"),
            maximize=flag(self.maximize, "maximize"),
            no_decay=patterns(self.no_decay, "no_decay"),
            lr_factor=factors(self.lr_factor, "lr_factor"),
            clip_norm=None if self.clip_norm is None else positive(self.clip_norm, "clip_norm"),
            ema=None if self.ema is None else number(self.ema, "ema", below=1),
        )

    def _set(self, **options: Any) -> None:
        """Replaces options by what their checks returned."""
        for name, value in options.items():
            object.__setattr__(self, name, value)

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the arrays of state that each weight has, as torch names them.

        Each has the shape and the dtype of the weight. Only the arrays that the options need exist.
        """
        return (*self._slots(), EMA) if self.ema is not None else self._slots()

    @abstractmethod
    def _slots(self) -> tuple[str, ...]:
        """Returns the slots without the moving average of the weights."""

    @abstractmethod
    def _scalars(self, lr: float, weight_decay: float, updates: int) -> Scalars:
        """Returns the numbers of a step for a group with this learning rate and weight decay."""

    @abstractmethod
    def _step(self, scalars: Scalars, number: Number) -> Step:
        """Returns what updates a block in a step with these numbers."""

    def initial(self, slot: str, weights: Array) -> Array:
        """Returns what a slot holds before the first update, in new memory.

        Args:
            slot: one of ``slots``.
            weights: the weights before the first update, of any shape, float32 or float64.

        Raises:
            InvalidArgumentError: there is no such slot, or the weights have another dtype.
        """
        if slot not in self.slots:
            raise InvalidArgumentError(f"slot must be one of {list(self.slots)} for {self.name}, not {shown(slot)}")
        check_dtype(weights.dtype, "the weights")
        if slot == EMA:
            return np.array(weights, order="C")
        return np.full(weights.shape, self._initial_value(slot), weights.dtype)

    def _initial_value(self, slot: str) -> float:  # noqa: ARG002 - Adagrad's begins elsewhere
        return 0.0

    # Groups of leaves.

    @cached_property
    def _groups(self) -> tuple[_Group, ...]:
        """Every group that leaves can be in, whether or not there are such leaves."""
        decays = (True, False) if self.weight_decay and self.no_decay else (True,)
        return tuple(_Group(d, f) for f in dict.fromkeys((1.0, *self.lr_factor.values())) for d in decays)

    def groups(self, paths: Sequence[str]) -> tuple[tuple[int, ...], int]:
        """Returns which group each leaf is in. Leaves of a group have the same learning rate and weight decay.

        The number of groups depends on the options alone, so a group may have no leaf.

        Args:
            paths: the paths of the leaves of a tree, such as "layers/0/w".

        Returns:
            The number of each leaf's group, counted from 0, in the order of the paths; and the number of groups.

        Raises:
            InvalidArgumentError: a pattern of ``no_decay`` or ``lr_factor`` matches no leaf, so it is misspelt or
                written for another model.
        """
        for option, of_option in (("no_decay", self.no_decay), ("lr_factor", self.lr_factor)):
            for pattern in of_option:
                if not any(fnmatch.fnmatchcase(path, pattern) for path in paths):
                    raise InvalidArgumentError(
                        f"pattern {shown(pattern)} of {option} must match the path of a leaf, but matches none of "
                        f"{shown(list(paths))}"
                    )
        numbers = {group: place for place, group in enumerate(self._groups)}
        return tuple(numbers[self._group_of(path)] for path in paths), len(self._groups)

    def _group_of(self, path: str) -> _Group:
        decays = not self.weight_decay or not any(fnmatch.fnmatchcase(path, pattern) for pattern in self.no_decay)
        for pattern, factor in self.lr_factor.items():
            if fnmatch.fnmatchcase(path, pattern):
                return _Group(decays, factor)
        return _Group(decays, 1.0)

    # The numbers of a step.

    def scalars(
        self, step: int, updates: int, metrics: Mapping[str, float] = MappingProxyType({})
    ) -> tuple[Scalars, ...]:
        """Returns the numbers of a step that need a power or the schedule, for each group.

        Powers differ in their last bits between machines, so one process computes them, the chief.

        Args:
            step: the step of the run, counted from 0, for the schedule.
            updates: which update of this state it is, counted from 1, for the corrections of bias.
            metrics: the means of the metrics of the step's gradients, for an ``lr`` that is one of them.

        Raises:
            InvalidArgumentError: the learning rate is missing from the metrics, or differs among gradients; it or what
                the function ``lr`` returned is not a number of at least 0; the optimizer came from a config without its
                ``lr``; or a number overflows.
        """
        updates = integer(updates, "updates", low=1)
        if isinstance(self.lr, str):
            if self.lr not in metrics:
                raise InvalidArgumentError(
                    f"the learning rate is the metric {self.lr}, which no gradient of step {step} has: pass it to "
                    "apply(), as metrics="
                )
            if isinstance(metrics, Means) and self.lr in metrics.ranges:
                low, high = metrics.ranges[self.lr]
                raise InvalidArgumentError(
                    f"the learning rate of step {step} must be the same in all processes, but is between {low:g} and "
                    f"{high:g}: a scheduler like ReduceLROnPlateau needs a metric that is the same in all of them, "
                    "such as a mean in history()"
                )
            lr = number(metrics[self.lr], f"metric {self.lr}, the learning rate of step {step},")
        else:
            lr = number(self.lr(step), f"the result of lr({step})") if callable(self.lr) else self.lr
        every = tuple(
            self._scalars(lr * group.factor, self.weight_decay if group.decays else 0.0, updates)
            for group in self._groups
        )
        if not all(math.isfinite(scalar) for scalars in every for scalar in scalars):
            raise InvalidArgumentError(f"the numbers of step {step} must be finite, but lr={lr:g} makes one overflow")
        return every

    def scalars_ahead(self, step: int, updates: int) -> tuple[Scalars, ...] | None:
        """Returns ``scalars`` before the step has gradients; None if the learning rate is one of their metrics.

        Args:
            step: as for ``scalars``.
            updates: as for ``scalars``.

        Raises:
            InvalidArgumentError: as ``scalars``.
        """
        return None if isinstance(self.lr, str) else self.scalars(step, updates)

    @property
    def scalars_per_group(self) -> int:
        """How many numbers a step has for each group."""
        return len(self._scalars(0.0, 0.0, 1))

    @property
    def num_groups(self) -> int:
        """The number of groups."""
        return len(self._groups)

    def clip_scale(self, sum_of_squares: float) -> float:
        """Returns what the mean is multiplied by so that its norm is at most ``clip_norm``.

        Args:
            sum_of_squares: the sum of the squares of all elements of the mean.

        Returns:
            A number in [0, 1]. 0 if the sum is infinite, NaN if it is NaN, 1 if nothing is clipped.
        """
        if self.clip_norm is None:
            return 1.0
        scale = self.clip_norm / (math.sqrt(sum_of_squares) + _CLIP_EPS)
        # A comparison with NaN is false: a gradient with NaN must not look like one that is small enough.
        return 1.0 if scale > 1 else scale

    # The form that travels.

    def to_config(self) -> dict[str, Any]:
        """Returns the name and all options as a dict, for ``from_config``. JSON and MessagePack keep all bits of it.

        An ``lr`` that is no number becomes None.
        """
        options = {each.name: getattr(self, each.name) for each in fields(self)}
        if not isinstance(self.lr, float):
            options["lr"] = None
        return {"name": self.name, **options}

    def state_matches(self, other: Optimizer) -> bool:
        """Returns whether state that another optimizer has written can continue with this one.

        That is so if it has the same slots with the same meaning, as those of Adam and AdamW have. Other numbers, such
        as the betas, may differ.
        """
        # No two optimizers use the same names for something else: a momentum_buffer alone is SGD's.
        return self.slots == other.slots


def check_dtype(dtype: np.dtype[Any], what: str) -> None:
    """Checks that weights of a dtype can be updated.

    Args:
        dtype: the dtype of a leaf.
        what: the leaf in errors, for example "leaf 'layers/0/w'".

    Raises:
        InvalidArgumentError: it is neither float32 nor float64, in the byte order of this machine.
    """
    if dtype not in _DTYPES:
        raise InvalidArgumentError(
            f"{what} must be float32 or float64 for an optimizer, not {dtype}: updates in fewer bits get lost in "
            "rounding. Give it float32 weights, and encoding='bfloat16' if gradients have to be small"
        )


def _rate(value: Any) -> Rate:
    # The text "0.1" is meant as a number.
    if isinstance(value, str) and value[:1].isalpha():
        return metric_name(value)
    return value if callable(value) else number(value, "lr")


def positive(value: object, what: str) -> float:
    """Returns a finite number above 0.

    Raises:
        InvalidArgumentError: it is something else.
    """
    found = number(value, what)
    if not found:
        raise InvalidArgumentError(f"{what} must be above 0, not {shown(value)}")
    return found
