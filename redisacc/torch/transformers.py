"""Hugging Face's Trainer, whose steps several processes make together.

Needs transformers and accelerate. Start the processes with `redisacc run`, not with torchrun or `accelerate launch`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from redisacc._handles.environment import place
from redisacc._text import shown
from redisacc.data import Batches
from redisacc.errors import InvalidArgumentError
from redisacc.torch._optimizer import Optimizer
from redisacc.torch._sampler import Sampler

__all__ = ["Follow", "Shares", "join"]

logger = logging.getLogger("redisacc")


class Shares(torch.utils.data.Sampler[int]):
    """Yields this process's examples, epoch after epoch, until the run is finished.

    Args:
        optimizer: the optimizer.
        sampler: its sampler.
        size: how many examples this process uses in all.
    """

    def __init__(self, optimizer: Optimizer, sampler: Sampler, size: int) -> None:
        self._optimizer, self._sampler, self._size = optimizer, sampler, size

    def __len__(self) -> int:
        """Returns how many examples this process uses in all."""
        return self._size

    def __iter__(self) -> Iterator[int]:
        while not self._optimizer.finished:
            yield from self._sampler


class Follow(TrainerCallback):  # type: ignore[misc]
    """Lets a Trainer count the steps of the run, which a process that is started again has not made itself.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Begins with the step that is reached."""
        state.global_step = self._optimizer.training_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Takes over the step."""
        state.global_step = self._optimizer.training_step
        control.should_training_stop = self._optimizer.finished


def join(trainer: Trainer, shared_name: str, *, workers: int | None = None, **options: Any) -> Optimizer:
    """Makes the steps of a Trainer together with those of the other processes that call this.

    The optimizer that the Trainer makes is wrapped in a ``redisacc.torch.Optimizer``, and each process gets its share
    of the data. ``max_grad_norm`` limits the mean gradient, and the schedule follows the steps of all. ``max_steps``,
    or ``num_train_epochs`` of the whole dataset, determines the length of the run; a step uses
    ``per_device_train_batch_size`` times ``gradient_accumulation_steps`` examples of each process. The Trainer counts
    all of it as one epoch, so evaluate after a number of steps. Only worker 0 saves.

    Call it after you have made the Trainer, and before ``train()``. Blocks as ``redisacc.torch.Optimizer`` does.

    Example:
        ::

            trainer = Trainer(model, arguments, train_dataset=data)
            redisacc.torch.transformers.join(trainer, "gpt")
            trainer.train()

    Args:
        trainer: the Trainer. Its dataset must have a length.
        shared_name: the name of the run.
        workers: the number of processes, as for ``redisacc.torch.Optimizer``.
        options: further arguments of ``redisacc.torch.Optimizer``.

    Returns:
        The optimizer.

    Raises:
        InvalidArgumentError: the dataset has no length, the number of processes is unknown, or as for
            ``redisacc.torch.Optimizer``.
    """
    args, data, here = trainer.args, trainer.train_dataset, place()
    workers = workers or here.workers
    if not hasattr(data, "__len__"):
        raise InvalidArgumentError(
            f"the Trainer's train_dataset must have a length, unlike {shown(type(data).__name__)}: let each process "
            "read its own part of a stream, and pass optimizers= with a redisacc.torch.Optimizer"
        )
    if workers is None:
        raise InvalidArgumentError(
            "the number of processes is unknown: start them with `redisacc run --workers N`, or pass workers="
        )
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    epochs = Batches(len(data), batch * workers)
    steps = args.max_steps if args.max_steps > 0 else epochs.steps(int(args.num_train_epochs))
    clip_norm = args.max_grad_norm or None
    optimizer = Optimizer(
        trainer.create_optimizer(),
        shared_name,
        trainer.model,
        **{"workers": workers, "clip_norm": clip_norm, "until": steps, **options},
    )
    # A Trainer that has made its own would make another one.
    trainer.optimizer, trainer.lr_scheduler = optimizer, None
    scheduler = trainer.create_scheduler(num_training_steps=steps, optimizer=optimizer)
    trainer.lr_scheduler, trainer._created_lr_scheduler = optimizer.resume(scheduler), False
    shares = Shares(optimizer, optimizer.sampler(data, batch, seed=args.seed), steps * batch)
    trainer._get_train_sampler = lambda *_, **__: shares
    trainer.add_callback(Follow(optimizer))
    # It would clip the gradient of each process; with 0, it still multiplies all by 1, for its log.
    args.max_grad_norm, args.max_steps = 0.0, steps
    trainer.accelerator.clip_grad_norm_ = _norm
    if optimizer.training.number != 0:
        args.save_strategy = type(args.save_strategy)("no")
    return optimizer


def _norm(parameters: Any, *_: object) -> Any:
    """Returns the norm that a Trainer logs."""
    return torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
