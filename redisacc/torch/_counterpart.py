"""Reads an optimizer of torch into the one of ``redisacc.optim`` that makes the same updates."""

from __future__ import annotations

import glob
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from redisacc import optim
from redisacc._text import shown
from redisacc.errors import InvalidArgumentError

# The metric by which each gradient brings the learning rate of its step.
LR = "lr"

# Class → its counterpart, and the options that both have.
_COUNTERPARTS: dict[type[Any], tuple[type[optim.Optimizer], tuple[str, ...]]] = {
    torch.optim.SGD: (optim.SGD, ("momentum", "dampening", "nesterov")),
    torch.optim.Adam: (optim.Adam, ("betas", "eps", "amsgrad")),
    torch.optim.AdamW: (optim.AdamW, ("betas", "eps", "amsgrad")),
    torch.optim.SparseAdam: (optim.Adam, ("betas", "eps")),
    torch.optim.Adagrad: (optim.Adagrad, ("lr_decay", "eps", "initial_accumulator_value")),
    torch.optim.RMSprop: (optim.RMSprop, ("alpha", "eps", "momentum", "centered")),
}

# Further options that the counterpart has.
_OF_UPDATES = ("weight_decay", "decoupled_weight_decay", "maximize")

# What groups may differ in, and what concerns only how fast torch computes an update.
_OF_GROUPS = frozenset(
    ("params", "param_names", "lr", "initial_lr", "weight_decay", "foreach", "fused", "capturable", "differentiable")
)


class Counterpart(NamedTuple):
    """What an optimizer of torch is here.

    Attributes:
        optimizer: the one that makes the updates. Its learning rate comes with the gradients.
        base: the number of the group whose learning rate that is.
        factors: what the learning rate of each group is of it.
        options: the other options of each group.
    """

    optimizer: optim.Optimizer
    base: int
    factors: tuple[float, ...]
    options: tuple[Mapping[str, Any], ...]

    def lr(self, groups: Sequence[Mapping[str, Any]]) -> float:
        """Returns the learning rate of a step.

        Raises:
            InvalidArgumentError: the rates of the groups are no longer in the proportion that they began with, or
                another option has changed.
        """
        lr = float(groups[self.base]["lr"])
        for number, (group, factor, options) in enumerate(zip(groups, self.factors, self.options, strict=True)):
            for name, value in options.items():
                if _number(group[name]) != value:
                    raise InvalidArgumentError(
                        f"{name} of parameter group {number} was {shown(value)} when the optimizer was wrapped, and is "
                        f"{shown(group[name])} now, but only the learning rate may change. If a scheduler changes it, "
                        "turn that off, for example with OneCycleLR(…, cycle_momentum=False)"
                    )
            if not math.isclose(float(group["lr"]), lr * factor, rel_tol=1e-9, abs_tol=1e-300):
                raise InvalidArgumentError(
                    f"the learning rate of parameter group {number} must stay {factor:g} times as large as group "
                    f"{self.base}'s, as it was in the beginning, but they are {float(group['lr']):g} and {lr:g}: "
                    "let a scheduler change all groups by the same factor"
                )
        return lr


def counterpart(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    *,
    clip_norm: float | None,
    ema: float | None,
) -> Counterpart:
    """Returns what makes the updates of an optimizer of torch.

    Args:
        optimizer: the optimizer.
        names: the name of each parameter of the model.
        clip_norm: the largest norm of the mean gradient.
        ema: the decay of a moving average of the weights.

    Raises:
        InvalidArgumentError: there is none for this optimizer, its options, or a parameter.
    """
    if type(optimizer) not in _COUNTERPARTS:
        known = ", ".join(sorted(each.__name__ for each in _COUNTERPARTS))
        raise InvalidArgumentError(
            f"optimizer must be one of torch's {known}, which have a counterpart in redisacc.optim, not "
            f"{type(optimizer).__name__}. Without sparse gradients and ema=, fused=False takes any optimizer"
        )
    kind, options = _COUNTERPARTS[type(optimizer)]
    groups = optimizer.param_groups
    of_groups = trained_names(optimizer, names)
    first = groups[0]
    for number, group in enumerate(groups):
        for name in sorted({*first, *group} - _OF_GROUPS):
            if group.get(name) != first.get(name):
                raise InvalidArgumentError(
                    f"parameter groups may differ in lr and weight_decay only, but {name} is {shown(first.get(name))} "
                    f"in group 0 and {shown(group.get(name))} in group {number}"
                )
        if group.get("differentiable"):
            raise InvalidArgumentError("differentiable=True has no counterpart: the update runs outside of torch")
    if kind is optim.Adam and first.get("decoupled_weight_decay"):
        kind = optim.AdamW
    # The largest group needs no patterns.
    base = max(range(len(groups)), key=lambda number: len(of_groups[number]))
    factors = _factors(groups, base)
    decays = [float(group.get("weight_decay", 0.0)) for group in groups]
    used = sorted({*decays} - {0.0})
    if len(used) > 1:
        raise InvalidArgumentError(
            f"the weight_decay of parameter groups must be 0 or the same number in all, not {used[0]:g} and {used[1]:g}"
        )
    own: dict[str, Any] = {name: _number(first[name]) for name in options}
    patterns = [[glob.escape(name) for name in of_group] for of_group in of_groups]
    return Counterpart(
        kind(
            LR,
            weight_decay=used[0] if used else 0.0,
            maximize=first.get("maximize", False),
            no_decay=[
                name for names, decay in zip(patterns, decays, strict=True) if used and not decay for name in names
            ],
            lr_factor={
                name: factor for names, factor in zip(patterns, factors, strict=True) if factor != 1 for name in names
            },
            clip_norm=clip_norm,
            ema=ema,
            **own,
        ),
        base,
        factors,
        tuple([{name: _number(group[name]) for name in (*options, *_OF_UPDATES) if name in group} for group in groups]),
    )


def trained_names(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> list[list[str]]:
    """Returns the names of the parameters of each group that are trained.

    Args:
        optimizer: the optimizer.
        names: the name of each parameter of the model.

    Raises:
        InvalidArgumentError: there are none, or one of them cannot be trained.
    """
    found = [_names_of(group["params"], names, number) for number, group in enumerate(optimizer.param_groups)]
    if not any(found):
        raise InvalidArgumentError("none of the optimizer's parameters requires a gradient")
    return found


def _names_of(parameters: Sequence[torch.Tensor], names: Mapping[torch.Tensor, str], number: int) -> list[str]:
    """Returns the names of those parameters of a group that are trained."""
    for place, parameter in enumerate(parameters):
        if parameter not in names:
            raise InvalidArgumentError(
                f"each parameter of the optimizer must be one of the model, but parameter {place} of group {number}, "
                f"of shape {tuple(parameter.shape)}, is none"
            )
        if not parameter.requires_grad:
            continue
        if parameter.dtype not in (torch.float32, torch.float64):
            raise InvalidArgumentError(
                f"parameter {shown(names[parameter])} must be float32 or float64, not {parameter.dtype}: updates in "
                "fewer bits get lost in rounding. Keep the weights in float32, and compute under torch.autocast"
            )
        if any(kind.__name__ == "DTensor" for kind in type(parameter).__mro__):
            raise InvalidArgumentError(
                f"parameter {shown(names[parameter])} is a DTensor, which is spread over several processes, but each "
                "process of this run has the whole model"
            )
        if parameter.layout is not torch.strided or parameter.is_meta:
            raise InvalidArgumentError(f"parameter {shown(names[parameter])} must be a dense tensor that has values")
    return [names[parameter] for parameter in parameters if parameter.requires_grad]


def _factors(groups: Sequence[Mapping[str, Any]], base: int) -> tuple[float, ...]:
    # A scheduler that warms up has changed "lr", and has noted what it was.
    rates = [float(group.get("initial_lr", group["lr"])) for group in groups]
    if not rates[base] and any(rates):
        raise InvalidArgumentError(f"the learning rate of parameter group {base}, the largest one, must be above 0")
    return tuple(rate / rates[base] if rates[base] else 1.0 for rate in rates)


def _number(value: Any) -> Any:
    """Returns an option of torch without its tensors."""
    if isinstance(value, torch.Tensor):
        return value.item()
    return tuple(map(_number, value)) if isinstance(value, (tuple, list)) else value


def lr_metric(found: Counterpart | None, groups: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the learning rate as a metric, if there is one: some optimizers choose it themselves."""
    lr = groups[0].get(LR) if found is None else found.lr(groups)
    return {} if lr is None else {LR: float(lr)}
