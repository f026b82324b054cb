"""What is called in the passes of a model and the steps of its optimizer. It keeps no object alive that it calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch


class Hooks:
    """What is called, by methods that each get one argument."""

    def __init__(self) -> None:
        self._first: list[Any] = []
        self._others: list[Any] = []

    def before_first_pass(self, model: torch.nn.Module, start: Callable[[bool], None]) -> None:
        """Has a method called with False before the first forward pass that computes gradients."""
        first_pass = FirstPass(_weak(start))
        self._first = [
            module.register_forward_pre_hook(first_pass)
            for module in model.modules()
            if not isinstance(module, torch.jit.ScriptModule)
        ]

    def after_gradients(self, tensors: Mapping[str, torch.Tensor], note: Callable[[torch.Tensor], None]) -> None:
        """Has a method called with each parameter whose gradient a backward pass has completed."""
        call = _weak(note)
        self._others += [
            tensor.register_post_accumulate_grad_hook(call) for tensor in tensors.values() if tensor.requires_grad
        ]

    def before_steps(self, optimizer: torch.optim.Optimizer, check: Callable[[torch.optim.Optimizer], None]) -> None:
        """Has a method called with an optimizer before each of its steps."""
        call = _weak(check)
        self._others.append(optimizer.register_step_pre_hook(lambda optimizer, *_: call(optimizer)))

    def forget_first_pass(self) -> None:
        """Has nothing called before forward passes any more."""
        for hook in self._first:
            hook.remove()
        self._first = []

    def remove(self) -> None:
        """Has nothing called any more."""
        self.forget_first_pass()
        for hook in self._others:
            hook.remove()
        self._others = []


class FirstPass:
    """Called before a module's forward pass. A copy of the module has a function that does nothing.

    Args:
        start: called before the first pass that computes gradients.
    """

    def __init__(self, start: Callable[[Any], None]) -> None:
        self._start = start

    def __call__(self, *_: object) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._start(False)

    def __reduce__(self) -> tuple[Any, ...]:
        return _do_nothing, ()


def _do_nothing(*module_and_inputs: object) -> Any:
    return None if module_and_inputs else _do_nothing


def _weak(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Returns a function that calls a method, and does not keep its object alive: a model has it for good."""
    found = weakref.WeakMethod(method)

    def call(argument: Any) -> None:
        alive = found()
        if alive is not None:
            alive(argument)

    return call
