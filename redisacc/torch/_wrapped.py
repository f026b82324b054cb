"""What a program wraps: an optimizer of torch and a model."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch

from redisacc._handles.environment import Place
from redisacc._text import shown
from redisacc._training.local_steps import LocalSteps
from redisacc.errors import InvalidArgumentError
from redisacc.torch._counterpart import Counterpart, counterpart, trained_names
from redisacc.torch._state import plain


class Wrapped:
    """An optimizer of torch and a model, and how their steps are made.

    Args:
        optimizer, model, fused, clip_norm, ema: as for ``redisacc.torch.Optimizer``.
        here: the place of this process in a run.
        sparse: names of parameters whose gradients are sparse.

    Raises:
        InvalidArgumentError: an argument is invalid, or the optimizer cannot make its steps in this way.

    Attributes:
        inner: torch's optimizer.
        local: what has each process make several steps alone; None if none does.
        counterpart: the translation of the optimizer; None if each process makes the steps itself.
        has_mean: whether these are steps with the mean gradient of all.
        tensors: the parameters that are trained, by name.
        frozen: the others of the optimizer.
        untrained: all others of the model.
        rows: the names of those whose gradients are sparse.
        buffers: the buffers of the model, by name.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | LocalSteps,
        model: torch.nn.Module,
        here: Place,
        fused: bool | None,
        *,
        clip_norm: float | None,
        ema: float | None,
        sparse: Any,
    ) -> None:
        if isinstance(sparse, bool):
            raise InvalidArgumentError(f"sparse must list names of parameters, not be {sparse}")
        self.local = optimizer if isinstance(optimizer, LocalSteps) else None
        inner: Any = optimizer if self.local is None else self.local.optimizer
        self.inner = inner
        _check(inner, model, here)
        names = {parameter: plain(name) for name, parameter in model.named_parameters()}
        rows = _sparse_names(model, names, sparse)
        found: Counterpart | None = None
        if self.local is not None:
            _check_alone(inner, names, "LocalSteps", ema=ema, sparse=[*sparse] or None, clip_norm=clip_norm)
        else:
            needs_fused = bool(rows) or ema is not None
            found = _translated(inner, names, fused, needs_fused=needs_fused, clip_norm=clip_norm, ema=ema)
            if found is None:
                # Mean gradients are published, and no weights.
                _check_alone(inner, names, "fused=False", ema=ema, sparse=sorted(rows) or None)
        self.counterpart, self.has_mean = found, self.local is None and found is None
        every = {names[each]: each for group in inner.param_groups for each in group["params"]}
        # With the mean, frozen ones may be trained later.
        may_be_frozen = (torch.float32, torch.float64) if self.has_mean else ()
        self.tensors = {name: each for name, each in every.items() if each.requires_grad or each.dtype in may_be_frozen}
        self.frozen = {name: each for name, each in every.items() if name not in self.tensors}
        self.untrained = {name: each for each, name in names.items() if name not in self.tensors}
        self.rows = rows & self.tensors.keys() if found else set()
        self.buffers = {plain(name): each for name, each in model.named_buffers()}


def _check(optimizer: object, model: object, here: Place) -> None:
    """Raises InvalidArgumentError for what is neither an optimizer nor a model, and in a process that only leads."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(f"optimizer must be one of torch.optim, not {shown(type(optimizer).__name__)}")
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(f"model must be a torch.nn.Module, not {shown(type(model).__name__)}")
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise InvalidArgumentError(
            "model must not be wrapped in DistributedDataParallel, which averages gradients as well"
        )
    if here.role == "chief":
        raise InvalidArgumentError(
            "the environment says that this process is the chief, but each process of this run works, and one "
            "of them leads as well: start it with `redisacc run` without --chief"
        )


def _translated(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    fused: bool | None,
    *,
    needs_fused: bool,
    **options: Any,
) -> Counterpart | None:
    """Returns the translation of an optimizer; None if each process is to make the steps itself."""
    if fused is False or not (fused or needs_fused or len(optimizer.param_groups) == 1):
        return None
    try:
        return counterpart(optimizer, names, **options)
    except InvalidArgumentError:
        if fused or needs_fused:
            raise
        return None


def _check_alone(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], how: str, **options: Any) -> None:
    """Checks that an optimizer of torch can make the steps itself, and that there is nothing that it cannot have."""
    trained_names(optimizer, names)
    for option, given in options.items():
        if given is not None:
            raise InvalidArgumentError(
                f"{option} must be left out with {how}, because torch's own optimizer makes the steps"
            )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise InvalidArgumentError(
            f"optimizer must be one whose step() needs no closure, unlike {type(optimizer).__name__}, which computes "
            "several gradients in each step"
        )


def _sparse_names(model: torch.nn.Module, names: Mapping[torch.Tensor, str], given: Collection[str]) -> set[str]:
    for name in given:
        if name not in names.values():
            raise InvalidArgumentError(f"sparse must list parameters of the model, but has {shown(name)}")
    tables = [each for each in model.modules() if isinstance(each, (torch.nn.Embedding, torch.nn.EmbeddingBag))]
    # The weight of one with a parametrisation is computed.
    return {*given, *(names[table.weight] for table in tables if table.sparse and table.weight in names)}
