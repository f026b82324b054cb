"""An optimizer of torch whose steps several processes make together."""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn, SupportsFloat, Unpack

import torch

from redisacc._arrays.metrics import Means
from redisacc._handles.environment import place
from redisacc._handles.options import check_names, with_options
from redisacc._text import shown
from redisacc._training.checkpointer import folder_of
from redisacc._training.local_steps import LocalSteps
from redisacc._training.options import TrainingOptions, gradient_options
from redisacc._training.training import Training
from redisacc.errors import ConflictError, InvalidArgumentError
from redisacc.optim.algorithms import MeanGradient
from redisacc.optim.base import positive
from redisacc.torch._counterpart import LR, lr_metric
from redisacc.torch._groups import OPTIONS, digest_text
from redisacc.torch._hooks import Hooks
from redisacc.torch._local import TorchModel
from redisacc.torch._mean import EVERY, MeanSteps
from redisacc.torch._rest import Rest
from redisacc.torch._sampler import Progress, Sampler
from redisacc.torch._state import state_of, torch_state
from redisacc.torch._upload import Gradients
from redisacc.torch._weights import Weights
from redisacc.torch._wrapped import Wrapped

logger = logging.getLogger("redisacc")

# What is done, for log records.
LOOK = "to look for the run"


class Optimizer(torch.optim.Optimizer):
    """Wraps a torch optimizer: several processes make each step together, with the mean of their gradients.

    All processes run the same program. The backward pass sends each gradient as soon as it is ready, unless it takes
    less than 5 ms on the CPU; ``step()`` sends the rest, and returns with the next weights in the model. You may kill
    and restart any process: it continues with the weights of the others, and the result has the same bits. It is built
    on ``redisacc.Training`` and its ``begin``.

    A new run begins with the first forward pass of worker 0, or its first ``step()``, with the weights that its model
    has then, so you may load weights after wrapping. In all other processes, the constructor blocks until the run has
    begun, and writes the latest weights into the model; frozen parameters and buffers are copied from worker 0, too.
    Weights are always written in place, so references to them stay valid. Don't change them between two steps:
    ``step()`` then raises an error that names the parameter. ``load_weights`` publishes others.

    Example:
        ::

            model = Net()
            inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
            optimizer = redisacc.torch.Optimizer(inner, "mnist", model, workers=4)
            for x, y in DataLoader(data, 64, sampler=optimizer.sampler(data, 64)):
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    A parameter without a gradient counts as one whose gradient is 0, because another process may have one for it: its
    weight decays, and its momentum still moves it. Parameters that the optimizer does not have stay as they are, and so
    do those that do not require a gradient when you wrap it. With ``fused=False``, you may unfreeze those later.

    Buffers, such as the statistics of BatchNorm, change in each process by themselves. Weights do not depend on them.
    Before you evaluate or save the model, make them equal with ``sync_buffers()``, or compute them with the weights
    that the model has: ``torch.optim.swa_utils.update_bn(loader, model)``.

    Keep the best accuracy, the patience of early stopping and the like with ``optimizer.training.keep``, which
    publishes a small value with the weights of the next step; ``optimizer.training.kept`` returns it after a restart.
    If processes train on the same examples, because the sampler was forgotten, a warning says so.

    Args:
        optimizer: the optimizer of ``torch.optim``. A new run begins with its state, such as one that its
            ``load_state_dict`` has loaded. Its learning rates (``param_groups``) are read in each step, so schedulers
            work: see ``resume``. With ``fused=True``, it is SGD, Adam, AdamW, SparseAdam, Adagrad or RMSprop; its other
            options must not change, and groups may differ in ``lr``, by factors that stay the same, and have a
            ``weight_decay`` or none. Or a ``redisacc.LocalSteps`` around any torch optimizer whose ``step`` needs no
            closure: each process makes several steps alone with it, and then sends how far its weights have moved.
        shared_name: the name of the run.
        model: the model, on its device and in its dtype; ``torch.compile`` may come before or after. The run's leaves
            have the names of its parameters.
        workers: the number of processes, among which ``sampler`` shares the data. None means the environment variable
            ``REDISACC_WORKERS``, else torchrun's, as ``redisacc.place`` says.
        number: the number of this process among the workers. None means ``REDISACC_WORKER_NUMBER``, else torchrun's,
            else the lowest free one.
        clip_norm: the largest norm of the mean gradient, as for ``redisacc.optim.Optimizer``. Use it instead of
            ``torch.nn.utils.clip_grad_norm_``, which would clip each process's gradient separately.
        ema: the decay of a moving average of the weights, as for ``redisacc.optim.Optimizer``.
        until: the step after which the run is finished, in all processes. None means it is never finished.
        fused: who makes the update. False: each process, with the wrapped optimizer and the mean gradient of all, as
            under ``DistributedDataParallel``. Any optimizer works whose ``step`` needs no closure, with any groups and
            schedulers. True: the process that leads, or reducers, with a translation of the optimizer, so one of those
            listed above. It is needed for sparse gradients and ``ema``. None means True for these, and for an optimizer
            with a translation and one group, because the server then has the weights and the state; otherwise False,
            because groups may change in ways that no translation supports. Give the same in all processes.
        snapshot_every: with ``fused=False``, the process that leads publishes a snapshot after this many steps, or
            earlier if mean gradients since the last one are large, or if a checkpoint is due: ``redisacc.Parameters``
            of the run's name with ".snapshot" has weights and buffers, and the state of the optimizer. A process that
            starts reads the last snapshot, and repeats the steps since. Checkpoints hold snapshots. At the same
            interval, processes compare digests of their weights: if machines round differently, all continue with the
            leader's weights, and a warning says so. Give the same in all processes.
        quorum, checkpoint, redis, patience, encoding: as for ``redisacc.Training``.
        accumulator: as for ``redisacc.Training``. ``sparse`` names parameters whose gradients are sparse; those of
            ``nn.Embedding(sparse=True)`` and ``nn.EmbeddingBag(sparse=True)`` are found without it.
        log: as for ``redisacc.Training``. It also gets the learning rate, as the metric "lr".

    Attributes:
        training: the ``redisacc.Training`` that it is built on.
        param_groups: the parameter groups of the wrapped optimizer.
        state: with ``fused=False``, the state of the wrapped optimizer; else empty, because ``state_dict`` fetches it.
        training_step: the step of the weights in the model: how many updates they have seen.
        finished: whether the run is finished. Then ``step()`` changes nothing.

    Raises:
        InvalidArgumentError: the optimizer, one of its options, a parameter or another argument is not supported; or
            the run of this name has another model, and the message names the first parameter that differs.
        RedisAccError: as ``redisacc.Training`` and its ``steps``.
    """

    # GradScaler then calls step() also if its gradients overflow, and step() can say what to use instead.
    _step_supports_amp_scaling = True

    @with_options(TrainingOptions, {})
    def __init__(
        self,
        optimizer: torch.optim.Optimizer | LocalSteps,
        shared_name: str,
        model: torch.nn.Module,
        *,
        workers: int | None = None,
        number: int | None = None,
        clip_norm: float | None = None,
        ema: float | None = None,
        until: int | None = None,
        fused: bool | None = None,
        snapshot_every: int = EVERY,
        **options: Unpack[TrainingOptions],
    ) -> None:
        check_names(options, TrainingOptions, type(self).__name__)
        gradients, here = gradient_options(options.get("accumulator")), place()
        wrapped = Wrapped(
            optimizer, model, here, fused, clip_norm=clip_norm, ema=ema, sparse=gradients.get("sparse") or ()
        )
        inner, local, found, has_mean = wrapped.inner, wrapped.local, wrapped.counterpart, wrapped.has_mean
        self._is_open = self._has_started = False
        self._hooks = Hooks()
        # The groups are the same dicts, so a scheduler may have either optimizer.
        super().__init__(inner.param_groups, inner.defaults)
        self._is_open = True
        # As if it had a state: torch's get_optimizer_state_dict makes a step with one that has none.
        self.state = State(dict)
        self._inner, self._counterpart = inner, found
        self._tensors, self._rows = wrapped.tensors, wrapped.rows
        self._weights = Weights(shared_name, self._tensors, wrapped.frozen, is_shared=local is None)
        mean = MeanSteps(inner, model, self._tensors, snapshot_every, clip_norm) if has_mean else None
        self._mean, self._until = mean, until
        self._steps: Iterator[tuple[int, Any]] | None = None
        self._progress = Progress()
        self._sampler: Sampler | None = None
        self._workers = here.workers if workers is None else workers
        options["accumulator"] = {**gradients, "sparse": sorted(self._rows)}
        alone = local and replace(local, optimizer=TorchModel(inner, self._tensors, self._weights.write))
        self.training = Training(
            shared_name,
            mean.gradients() if mean else {name: each.numpy(force=True) for name, each in self._tensors.items()},
            optimizer=found.optimizer if found else alone or MeanGradient(),
            state=state_of(inner, self._tensors, found.optimizer) if found else None,
            workers=self._workers,
            number=number,
            **options,
        )
        # Others need not wait for this process's leases once it has ended.
        weakref.finalize(self, self.training.close)
        self._gradients = Gradients(self.training, self._tensors, self._rows)
        # With the mean, frozen ones are in the snapshots.
        self._rest = Rest(self.training, options.get("redis"), {} if mean else wrapped.untrained, wrapped.buffers)
        self._begin(model, options.get("redis"), is_local=local is not None)

    def _begin(self, model: torch.nn.Module, redis: object, *, is_local: bool) -> None:
        """Gets the weights of a run that has begun, and watches gradients. Worker 0 begins a new one later."""
        mean, inner, training = self._mean, self._inner, self.training
        training._begins, has_checkpoint = training.number == 0, _has_checkpoint(training)
        try:
            if mean:
                inner.state = self.state = State(dict, inner.state)
                mean.open(training, redis)

            def has_begun() -> bool:
                # A checkpoint may be what the training continues with, or what another process has, if the server has
                # lost it.
                return (
                    training._published.step() is not None
                    or has_checkpoint
                    or (mean is not None and mean.restored() is not None)
                    or training._is_claimed()
                )

            if not training._begins or training._patience.call(has_begun, LOOK, in_steps=True):
                self._advance()
                # A snapshot has buffers, too, perhaps later ones.
                if mean is None or self._rest.step > (training.snapshot or 0):
                    self._rest.read()
        except BaseException:
            self.close()
            raise
        self._hooks.before_first_pass(model, self._start)
        if not is_local:
            self._hooks.after_gradients(self._tensors, self._ready)
            self._hooks.before_steps(inner, self._refuse)
        if self.training_step and any(_has_new_statistics(module) for module in model.modules()):
            logger.warning(
                "%s: the run is at step %d, and the statistics of BatchNorm begin in this process now. Before you "
                "evaluate or save the model, call sync_buffers(), or torch.optim.swa_utils.update_bn(loader, model)",
                self.training.shared_name,
                self._progress.at,
            )

    def __enter__(self) -> Optimizer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.training.shared_name!r}, {self._inner!r})"

    @property
    def training_step(self) -> int:
        """The step of the weights in the model: how many updates they have seen."""
        return self._progress.step

    @property
    def finished(self) -> bool:
        """Whether the run is finished: ``until`` is reached, or a process has called ``finish``."""
        return self._progress.finished

    def _start(self, has_gradients: bool) -> None:
        """Begins in the first pass that computes gradients: the weights that the model has by then are the run's.

        Args:
            has_gradients: whether there are gradients already, because the pass has gone around the modules' calls.
        """
        if self._has_started:
            return
        self._has_started = True
        self._hooks.forget_first_pass()
        self._weights.check_dtypes()
        if self._progress.at >= 0:
            if not self._progress.finished:
                self._write_again(has_gradients)
            return
        training, found = self.training, self._counterpart
        if training._patience.call(training._published.step, LOOK) is None:
            self._rest.begin()
            copies = {name: tensor.numpy(force=True).copy() for name, tensor in self._tensors.items()}
            values = copies if self._mean is None else self._mean.gradients()
            state = state_of(self._inner, self._tensors, found.optimizer) if found else None
            training._options = replace(training._options, parameters=values, state=state)
        self._advance()

    def _write_again(self, has_gradients: bool) -> None:
        """Writes the weights of the step into a model that the program has changed since this was made."""
        worker, mean = self.training._worker, self._mean
        if self._weights.changed() is None or worker is None or worker._latest is None:
            return
        tree = worker._latest[1]
        with self._weights.rewriting() as changed:
            if mean is not None:
                mean.step = -1
                mean.follow(self._progress.at, tree)
            else:
                self._weights.write(tree)
        if changed:
            logger.warning(
                "%s: the model's weights were changed after the optimizer was made, for example parameter %s. The run "
                "is at step %d, so its own weights count, and are in the model again. Only a new run begins with other "
                "ones; load_weights() publishes them as the next version",
                self.training.shared_name,
                shown(changed[0]),
                self._progress.at,
            )
            if has_gradients:
                # They are of other weights.
                self.training.skip()
                self.zero_grad()

    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        weight: float = 1.0,
        metrics: Mapping[str, SupportsFloat] | None = None,
    ) -> Any:
        """Sends the rest of the gradients, and returns with the next weights in the model.

        Blocks until each of the other workers has sent its gradients of this step as well. A finished run is not
        changed.

        If a gradient has changed since the backward pass sent it, for example by clipping or a second backward pass,
        this sends everything. A warning says so, and from then on all gradients are sent here. Torch counts changes of
        ``grad``, but not of ``grad.data``: do not use the latter to change a gradient.

        Args:
            closure: computes the loss and the gradients, as for torch's optimizers. It is called once.
            weight: the share of this process in the mean, such as the number of its examples.
            metrics: numbers that are sent with the gradients, such as the loss, as for ``redisacc.Training.apply``.
                "lr" is the learning rate.

        Returns:
            The closure's return value; None without one.

        Raises:
            InvalidArgumentError: a GradScaler scales the gradients; an option or the dtype of a parameter has changed
                since you wrapped the optimizer; or another argument is invalid.
            RedisAccError: as ``redisacc.Training.steps`` and ``apply``.
        """
        if hasattr(self, "found_inf"):
            # A GradScaler has set both.
            del self.found_inf, self.grad_scale
            raise InvalidArgumentError(
                "a GradScaler cannot be used, since it would leave out steps in one process and not in the others: use "
                "torch.autocast with bfloat16, which needs none"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._progress.finished:
            return loss
        self._start(True)
        self._progress.check(self.training.shared_name, self.param_groups)
        self._weights.check(may_freeze=self._counterpart is None)
        self._gradients.are_new = False
        if metrics is not None and LR in metrics:
            raise InvalidArgumentError('metrics must not have "lr", which is the learning rate')
        metrics = {**(metrics or {}), **lr_metric(self._counterpart, self.param_groups)}
        if self._mean is None and self._counterpart is None:
            self.training.apply(None, weight=weight, metrics=metrics)
        else:
            if not self._progress.at % (self._mean.every if self._mean else EVERY):
                metrics = Means(metrics)  # type: ignore[arg-type]
                metrics.digest = digest_text(each.grad for each in self._tensors.values())
            self._gradients.commit(weight, metrics, {OPTIONS: self._mean.options()} if self._mean else {})
        self._advance(keeps=True)
        # A scheduler may have been made for it, and looks.
        self._inner._opt_called = True
        return loss

    def skip(self) -> None:
        """Ends this step without gradients of this process, and returns with the next weights in the model.

        Call it instead of ``step()`` for a batch that is to be left out. The others do not wait for this process, and
        the mean is over their gradients. If all processes skip, the weights stay, and the step counts.

        Raises:
            RedisAccError: as ``redisacc.Training.skip``.
        """
        if self._progress.finished:
            return
        self._start(False)
        self._gradients.abandon()
        self.training.skip()
        self._advance()
        self._opt_called = self._inner._opt_called = True

    def load_weights(self) -> None:
        """Publishes the weights that the model of worker 0 has now as the next version, and writes it into the others.

        All processes have to call it, in the same step, instead of ``step()``. The optimizer's state stays. Gradients
        that others have sent for this step are dropped. Blocks until that version is published.

        Raises:
            RedisAccError: as ``redisacc.Training.steps``.
        """
        self._start(False)
        self._gradients.abandon()
        training = self.training
        if self._mean is not None:
            self._mean.reload()
            training.skip()
        while self._mean is None and training.number == 0 and not self._progress.finished:
            values = {name: tensor.numpy(force=True) for name, tensor in self._tensors.items()}
            step, state = training.latest_state()
            try:
                training._published.publish(values, step + 1, state=state)
                break
            except ConflictError:
                # A step was made meanwhile, without this process.
                continue
        self._advance()
        # No batch belongs to this step.
        self._progress.jumped += 1

    def sync_buffers(self) -> None:
        """Copies the buffers of worker 0, such as the statistics of BatchNorm, into the models of all processes.

        All processes have to call it after the same step, for example before they evaluate the model. Blocks until
        worker 0 has called it. A restarted process gets the buffers that were copied last.

        Raises:
            InvalidArgumentError: the run has not begun.
            RedisAccError: as ``redisacc.Parameters.publish`` and ``wait``.
        """
        if self._progress.at < 0:
            raise InvalidArgumentError("sync_buffers() needs a run that has begun: call it after a step()")
        if self._rest:
            if self.training.number == 0:
                self._rest.publish(self._progress.at)
            self._rest.read(self._progress.at)

    def _refuse(self, inner: torch.optim.Optimizer) -> None:
        if self._mean is None or not self._mean.is_stepping:
            raise InvalidArgumentError(
                f"call step() of the redisacc.torch.Optimizer, and not of the {type(inner).__name__} inside, which "
                "would move the weights of this process alone"
            )

    def _ready(self, tensor: torch.Tensor) -> None:
        self._gradients.are_new = True
        # Before the training has begun, step() sends all gradients.
        if self._progress.at >= 0 and not self._progress.finished:
            self._gradients.note(tensor)

    def _advance(self, *, keeps: bool = False) -> None:
        """Waits for the next weights, and writes them into the model, in which the mean gradient may stay."""
        progress, before, is_there = self._progress, self._progress.at, False
        self._gradients.are_new = False
        while not is_there:
            if self._steps is None:
                self._steps = self.training.steps(until=self._until)
            try:
                progress.at, tree = next(self._steps)
            except StopIteration:
                progress.finished = True
                progress.at, tree = self.training._patience.call(self.training.latest, LOOK, in_steps=True)
            except BaseException:
                # A generator that has raised is over. The next call begins another one.
                self._steps = None
                raise
            is_there = self._mean is None or self._mean.follow(
                progress.at, tree, finished=progress.finished, keeps=keeps
            )
        if self._mean is None and (self._counterpart is not None or progress.finished):
            self._weights.write(tree)
        self._weights.note()
        progress.follow(before)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients: in the ``with`` block, they stay in this process.

        Use it for all batches of a step but the last. Its backward pass sends the accumulated sums.
        """
        self._gradients.holds += 1
        try:
            yield
        finally:
            self._gradients.holds -= 1

    def clip_grad_norm_(self, max_norm: float) -> None:
        """Clips the mean gradient of this step, in ``step()``, as ``torch.nn.utils.clip_grad_norm_`` would.

        Give the same norm in each process. It replaces ``clip_norm`` in this step.

        Args:
            max_norm: the largest norm, above 0.

        Raises:
            InvalidArgumentError: the norm is invalid; or the update is fused: pass ``clip_norm`` when you wrap the
                optimizer.
        """
        if self._mean is None:
            raise InvalidArgumentError(
                "clip_grad_norm_() needs fused=False: wrap the optimizer with that, or with clip_norm="
            )
        self._mean.clip_norm = positive(max_norm, "max_norm")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients, as torch's optimizers do, and drops those that were sent without a ``step()``."""
        if not self._progress.finished:
            self._gradients.warn_if_new(self.training_step)
        self._gradients.abandon()
        super().zero_grad(set_to_none)

    def resume(self, scheduler: Any, *, steps: int | None = None) -> Any:
        """Brings a new scheduler to the step of the run, and keeps it there.

        A restarted process has a scheduler that begins at 0. This calls its ``step()`` once for each step of the run so
        far, and later once for each step that the others make without this process. Without it, the process would send
        the learning rate of an earlier step.

        Args:
            scheduler: a torch scheduler, for this optimizer or the wrapped one, which your loop steps after each
                ``step()``.
            steps: how often to step it now, for a scheduler that your loop steps at other times, such as once per
                epoch; it is then not kept at the run's step. None means once for each step of the run.

        Returns:
            The scheduler.

        Raises:
            InvalidArgumentError: the scheduler depends on more than the step.
        """
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise InvalidArgumentError(
                "scheduler must depend on nothing but the step, unlike ReduceLROnPlateau: step it without resume(), "
                "with a metric of optimizer.training.history(), which is the same in all processes"
            )
        if self.training_step:
            self._opt_called = self._inner._opt_called = True
        self._progress.keep(scheduler, steps)
        return scheduler

    def sampler(self, data: Sized, batch_size: int, *, shuffle: bool = True, seed: int = 0) -> Sampler:
        """Returns a sampler that gives each process its share of the data, for a ``DataLoader``.

        The examples of a process in a step depend only on the step, the worker's number and these arguments. So a
        restart neither loses nor repeats an example, as long as the number of workers stays the same. If it changes,
        the next pass begins as if the run had always had the new number, so an epoch may repeat or leave out examples.

        Args:
            data: a dataset with a length.
            batch_size: how many examples this process uses in each step: the DataLoader's, times the number of
                batches whose gradients are accumulated.
            shuffle: whether each epoch has its own order.
            seed: determines the orders; give the same in all processes.

        Returns:
            The sampler. Pass k over it, from 0, yields the rest of epoch k.

        Raises:
            InvalidArgumentError: an argument is invalid, or this worker's number is too high to have a share.
        """
        assert self.training.number is not None
        self._sampler = Sampler(
            data,
            batch_size,
            number=self.training.number,
            workers=self._workers if isinstance(self._workers, int) else self.training.workers,
            shuffle=shuffle,
            seed=seed,
            progress=self._progress,
        )
        return self._sampler

    def total_steps(self, epochs: int) -> int:
        """Returns the number of steps in a number of epochs, with the latest sampler, for a scheduler or ``until``.

        Args:
            epochs: the number of epochs.

        Raises:
            InvalidArgumentError: no sampler was made.
        """
        if self._sampler is None:
            raise InvalidArgumentError("total_steps() needs the size of the data: call sampler() before it")
        return self._sampler.steps(epochs).start

    def finish(self) -> None:
        """Ends the run for all processes: their next ``step()`` returns with the last weights."""
        self.training.finish()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state in torch's format, which the wrapped optimizer can load. Blocks until it is fetched.

        With ``LocalSteps``, it is the state of this process's optimizer.
        """
        if self._counterpart is None or self._progress.at < 0:
            return dict(self._inner.state_dict())
        _, state = self.training.latest_state()
        try:
            self.state.update(torch_state(self._inner, self._tensors, state))
            found: dict[str, Any] = super().state_dict()
        finally:
            self.state.clear()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Checks that the run has the state in a dict, or a later one. The run continues with its published state.

        A restarted process need not load anything. Before its first step, a new run loads the state, and begins with
        worker 0's; with ``fused=False``, load it into the optimizer before you wrap it. With ``LocalSteps``, the
        optimizer of this process loads it.

        Args:
            state_dict: a return value of ``state_dict``.

        Raises:
            InvalidArgumentError: the state has seen more updates than the run.
        """
        if self._mean is None and (self._counterpart is None or self._progress.at < 0):
            self._inner.load_state_dict(state_dict)
            self.param_groups = self._inner.param_groups
            return
        given = max([int(state.get("step", 0)) for state in state_dict["state"].values()], default=0)
        updates = self.training_step if self._mean else int(self.training.latest_state()[1]["updates"])
        if given > updates:
            raise InvalidArgumentError(
                f"the state has seen {given} updates, and the run {shown(self.training.shared_name)} only "
                f"{updates}: load it into the optimizer before it is wrapped, for a run of another name"
            )
        logger.info(
            "%s: the state that was loaded has seen %d updates, and the published one counts, which has seen %d",
            self.training.shared_name,
            given,
            updates,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses: the parameters of a run cannot change.

        Raises:
            InvalidArgumentError: always.
        """
        if self._is_open:
            raise InvalidArgumentError(
                "the parameters of a run cannot change: give the optimizer all groups before it is wrapped"
            )
        super().add_param_group(param_group)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a redisacc.torch.Optimizer cannot be pickled or copied, because it takes part in a run: save its "
            "state_dict()"
        )

    def close(self) -> None:
        """Gives the leases back, so another process leads within a second. The run can be continued."""
        self._hooks.remove()
        self._rest.close()
        if self._mean is not None:
            self._mean.close()
        self.training.close()


class State(defaultdict[Any, Any]):
    """The state of an optimizer, which is true also while it is empty."""

    def __bool__(self) -> bool:
        return True


def _has_checkpoint(training: Training) -> bool:
    """Returns whether a run may continue with a checkpoint. Its folder was tried when it was opened."""
    wanted = training._options.checkpoint
    return wanted is not None and bool(folder_of(wanted, training.shared_name).stored())


def _has_new_statistics(module: torch.nn.Module) -> bool:
    """Returns whether this is a BatchNorm that has not seen a batch."""
    batches = getattr(module, "num_batches_tracked", None)
    return isinstance(batches, torch.Tensor) and not int(batches)
