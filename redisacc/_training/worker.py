"""A worker of a training: it gets the parameters of each step, and applies a gradient."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, SupportsFloat

from redisacc._clock import clock, durations
from redisacc._data import validation
from redisacc._data.encodings import Encoding
from redisacc._data.results import ApplyResult
from redisacc._format.keys import Keys, ParameterKeys
from redisacc._handles import exit_code
from redisacc._handles.environment import MAX_WORKERS, place
from redisacc._handles.existing import open_existing
from redisacc._handles.tree import TreeAccumulator
from redisacc._protocol.parameters.ahead import PartsAhead
from redisacc._protocol.parameters.announced_workers import read_workers
from redisacc._protocol.parameters.conclusion import is_concluded_by
from redisacc._protocol.parameters.marks import deleted_incarnations, is_lost, is_over
from redisacc._protocol.rounds.who_contributed import has_contributed, read_contributors, states_text
from redisacc._protocol.scripts import StaleSequenceError
from redisacc._protocol.waiting.wait_log import WaitLog
from redisacc._training.crew_text import crew_text
from redisacc._training.gradients import apply_gradient, gradient_as_encoded, has_no_gradients
from redisacc._training.loss import Claimant
from redisacc._training.participant import Participant
from redisacc._training.upload import OpenUpload, Upload
from redisacc.errors import (
    CancelledError,
    DataLossError,
    FinishedError,
    InvalidArgumentError,
    NotFoundError,
    RedisAccError,
)

logger = logging.getLogger("redisacc")

# A worker looks less and less often whether its gradient is still there, but at least this often, in seconds: the
# server may lose it after a long wait, too.
LOOK_AT_LEAST_EVERY = 30.0


# How often a worker asks for the number of workers before there is a chief, in seconds.
ASK_EVERY = 0.2

# How often a worker asks whether a finished training is continued, in seconds.
ASK_FINISHED_EVERY = 0.1


class Worker(Participant):
    """A worker of a training: for each step it gets the parameters, and applies a gradient.

    Workers may join, leave, die and return at any moment. Each holds a number under a lease, which tells it its share
    of the data. It counts once per step, also if two processes of one number should run for a while.

    Example:
        ``Chief`` has one with both. A number is free again when its worker is closed:

        >>> import redisacc
        >>> with redisacc.Worker("docs-worker") as first, redisacc.Worker("docs-worker") as second:
        ...     first.number, second.number
        (0, 1)
        >>> with redisacc.Worker("docs-worker") as third:
        ...     third.number
        0

    Args:
        shared_name: the name of the training.
        number: the number of this worker, from 0. None: the environment variable ``REDISACC_WORKER_NUMBER``, which
            `redisacc run` sets; else the number of the predecessor with the same ``REDISACC_RUN_ID``; else the lowest
            free one.
        redis: a client of redis-py or valkey-py, a URL, or None, as for ``ConditionalAccumulator``.
        encoding: how the float32 elements of this worker's gradients travel: "float32" (or None), "bfloat16" or "int8",
            as for ``ConditionalAccumulator``. Workers may differ.
        finite: True: ``apply`` raises NotFiniteError for a gradient that holds NaN or an infinity, as for
            ``ConditionalAccumulator``.
        patience: for how many seconds every call waits while the server does not answer. None: forever. An outage that
            lasts for some seconds is logged once, and so is its end. If no server answers at the very beginning, an
            error is raised after a few seconds.

    Attributes:
        shared_name: the name of the training.
        number: the number of this worker.
        workers: among how many workers the data is shared.

    Raises:
        InvalidArgumentError: an argument or a variable of the environment is invalid, or this process is the chief.
        ConflictError: another process has this number. Its predecessor may still have it: if that is a process on this
            machine that is dead, its lease is taken at once; else it is waited for, for up to 10 seconds.
        ServerUnavailableError: no server answers.
    """

    def __init__(
        self,
        shared_name: str,
        *,
        number: int | None = None,
        redis: object = None,
        encoding: Encoding | None = None,
        finite: bool = False,
        patience: float | None = None,
    ) -> None:
        here = place()
        if here.role == "chief":
            raise InvalidArgumentError("the environment says that this process is the chief, so it cannot be a worker")
        given = here.number if number is None else validation.integer(number, "number", low=0, high=MAX_WORKERS - 1)
        super().__init__("worker", shared_name, here, redis=redis, patience=patience)
        self._encoding = encoding
        self._finite = validation.flag(finite, "finite")
        self._is_launched = here.role is not None
        self._chief_run_id = here.chief_run_id
        with self._closed_on_failure():
            if given is None:
                self.number = self._crew.take_number()
            else:
                self.number = given
                self._crew.wait_for(f"worker {given}")
            self._keep(f"worker {self.number}")
        ahead = PartsAhead(self._transport)
        self._opened.callback(ahead.close)
        self._parameters._reader.fetch_ahead(ahead)
        self._accumulator: Any = None
        self._upload = OpenUpload()
        self._claimant = Claimant(self._transport, self._parameters, self._place)
        self._lease.on_missing = self._claimant.claim_quietly
        # The step of the parameters that the loop got last; the gradient of that step, and its outcome.
        self._step: int | None = None
        self._gradient: Any = None
        self._weight = 1.0
        self._metrics: Mapping[str, SupportsFloat] | None = None
        self._has_applied = False
        self._next_check = self._next_look = 0.0
        self._pause = durations.look_after
        self._went_back = False
        # Whether the server has lost the gradient of this step for sure.
        self._has_lost_gradient = False
        # Among how many workers the data is shared, as the chief announced for this step; None: it was not read yet.
        self._workers: int | None = None
        self._has_warned = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shared_name!r}, number={self.number})"

    @property
    def workers(self) -> int:
        """How many workers there are, as announced by the chief.

        With it, a worker cuts its share of the data: ``data[worker.number :: worker.workers]``. A worker whose number
        is not below this one has no share of its own; a warning says so once.

        Blocks for a round trip; before the training has begun, until a chief begins it. In a loop over ``steps()``, it
        is read at most once in each step.

        Raises:
            ConflictError: another process has this worker's number now.
            NotFoundError: the training was deleted.
            ServerUnavailableError: the server did not answer for longer than ``patience``.
        """
        if self._workers is None:
            self._workers = self._patience.call(self._read_workers, "to read how many workers there are")
        if self.number >= self._workers and not self._has_warned:
            self._has_warned = True
            self._warn(
                "this is worker %d, and the data is shared among %d workers, 0 to %d, so it has no share of its own. "
                "Start the chief with more workers=; if workers come and go, draw examples at random instead",
                self.number,
                self._workers,
                self._workers - 1,
            )
        return self._workers

    def _read_workers(self) -> int:
        keys, log = ParameterKeys(self.shared_name), WaitLog(clock.now())
        while (found := read_workers(self._transport, keys)) is None:
            self._lease.check()
            now = clock.now()
            if log.is_due(now):
                self._warn("still waiting for a chief to say how many workers there are; %s", crew_text(self._crew))
            self._transport.waits.sleep(ASK_EVERY)
        return found

    def steps(self) -> Iterator[tuple[int, Any]]:
        """Yields each step and its parameters, for a loop that computes a gradient and applies it.

        Blocks until the parameters of a later step are published; a message after 5 seconds, and then less often, says
        who is expected, late or gone. Steps may be skipped if this worker is slow. The loop ends when the chief
        finishes the training, and at once if it has finished before, unless a chief that was started together with
        this worker may still continue it. The last parameters are not yielded, because no
        gradient of them is needed; ``Parameters(shared_name).latest()`` returns them.

        Yields:
            The step, and the parameters as a tree of read-only arrays.

        Raises:
            ConflictError: another process has this worker's number now, because this one stalled for too long.
            NotFoundError: the training was deleted.
            ServerUnavailableError: the server did not answer for longer than ``patience``.
        """
        if self._is_finished():
            return
        log: WaitLog | None = None
        while True:
            self._check_lease()
            try:
                step, tree = self._patience.call(self._wait, "to wait for parameters")
            except FinishedError:
                return
            except NotFoundError as error:
                found_gone = error
                self._wait_until_restored(found_gone)
                continue
            except DataLossError as error:
                # Only the chief can publish them again.
                now = clock.now()
                if log is None or log.is_due(now):
                    self._warn("%s; waiting for the chief", error)
                log = log or WaitLog(now)
                self._transport.waits.sleep(durations.look_every)
                continue
            except CancelledError:
                self._check_lease()
                if not self._went_back:
                    raise
                # The server was restarted from older data, so the gradients of an earlier step are needed again.
                self._warn(
                    "the server has lost the parameters of step %s; continuing with those that it has", self._step
                )
                self._step, self._went_back = None, False
                continue
            log = None
            self._upload.end()
            if self._step is not None:
                exit_code.advanced()
            self._step, self._gradient, self._has_applied = step, None, False
            self._claimant.latest = step, tree
            # Another chief may need another number.
            self._workers = None
            yield step, tree

    def _wait_until_restored(self, found_gone: RedisAccError) -> None:
        """Blocks until a training that the server has lost is there again; in the meantime, claims what this one has.

        Raises:
            RedisAccError: ``found_gone``, because the training, or its accumulator alone, was deleted.
        """
        keys, log = ParameterKeys(self.shared_name), WaitLog(clock.now())
        if not self._patience.call(lambda: self._is_training_lost(keys), "to look for the training"):
            raise found_gone
        self._warn(
            "the server has lost this training: it was flushed, or restarted without its data. Waiting for a chief to "
            "restore it"
        )
        while not self._patience.call(self._is_there_again, "to look for the training"):
            self._check_lease()
            if log.is_due(clock.now()):
                self._warn("still waiting for a chief to restore this training; %s", crew_text(self._crew))
            self._transport.waits.sleep(durations.look_every)
        # The accumulator is another one.
        self._upload.end()
        if self._accumulator is not None:
            self._accumulator.close()
            self._accumulator = None
        self._has_lost_gradient = True

    def _is_training_lost(self, keys: ParameterKeys) -> bool:
        """Returns whether the training was not deleted: the server has lost it, or a chief has begun it again since."""
        incarnation = self._parameters._reader.incarnation
        if incarnation in deleted_incarnations(self._transport, keys):
            return False
        if is_lost(self._transport, keys, incarnation):
            return True
        # The parameters are there. If the accumulator is not, it was deleted alone, or a chief is replacing it.
        give_up = clock.now() + durations.replaced_within
        while has_no_gradients(self._transport, self.shared_name):
            if clock.now() >= give_up:
                return False
            self._transport.waits.sleep(ASK_EVERY)
        return True

    def _is_there_again(self) -> bool:
        """Returns whether parameters are published: those that the server has lost, or others in their place."""
        if not self._claimant.look():
            return False
        try:
            return self._parameters.step() is not None
        except NotFoundError:
            if not is_over(self._transport, ParameterKeys(self.shared_name), self._parameters._reader.incarnation):
                # The server has lost them again.
                return False
            self._warn("a chief has begun this training again from other parameters; continuing with those")
            self._parameters._forget()
            self._step = None
            return True

    def _is_finished(self) -> bool:
        """Returns whether the training is finished. If a chief may be about to continue it, waits for that.

        The chief of this worker's run says what it does. For another one, this waits a moment.
        """
        began = clock.now()
        log = WaitLog(began)
        while self._patience.call(self._parameters.finished, "to read the parameters"):
            if self._chief_run_id is None:
                members = self._patience.call(self._crew.members, "to look for the chief")
                chief = any(member.number is None and member.left > 0 for member in members)
                if not (chief or self._is_launched) or clock.now() - began >= durations.continued_within:
                    return True
            elif self._patience.call(self._has_chief_concluded, "to read the parameters"):
                return True
            elif log.is_due(clock.now()):
                self._warn("the training is finished; still waiting for the chief, which may continue it")
            self._check_lease()
            self._transport.waits.sleep(ASK_FINISHED_EVERY)
        return False

    def _has_chief_concluded(self) -> bool:
        assert self._chief_run_id is not None
        return is_concluded_by(self._transport, ParameterKeys(self.shared_name), self._chief_run_id)

    def _wait(self) -> tuple[int, Any]:
        self._next_check = clock.now() + durations.look_every
        self._pause = durations.look_after
        self._next_look = clock.now() + (0.0 if self._has_lost_gradient else self._pause)
        self._has_lost_gradient = False
        return self._parameters.wait(self._step, skip_last=True, cancel=self._is_over, describe=self._describe)

    def _is_over(self) -> bool:
        """Looks, once a second, whether waiting for the next step still makes sense."""
        now = clock.now()
        if now < self._next_check:
            return False
        self._next_check = now + durations.look_every
        if self._lease.lost:
            return True
        if self._step is None:
            return False
        published = self._parameters.step()
        if published is not None and published < self._step:
            self._went_back = True
            return True
        if self._has_applied and now >= self._next_look:
            self._pause = min(2 * self._pause, LOOK_AT_LEAST_EVERY)
            self._next_look = now + self._pause
            self._look_after_gradient(self._step)
        return False

    def _look_after_gradient(self, step: int) -> None:
        """Applies the gradient of a step again if the server has lost it."""
        # In this order: if the round is taken between the two, the step has moved on.
        is_there = has_contributed(self._transport, Keys(self.shared_name), self._place)
        if not is_there and self._gradients().global_step() <= step:
            self._warn(
                "the gradient of step %s is not in the round, because the server has lost it; applying it again",
                step,
            )
            self._apply(self._gradient, self._weight, self._metrics, step)

    def _describe(self) -> str | None:
        clauses = [crew_text(self._crew)]
        if self._accumulator is not None:
            try:
                # Once the round of this step is taken, this worker waits for the chief, and not for other workers.
                if self._step is None or self._accumulator.global_step() <= self._step:
                    clauses = states_text(read_contributors(self._transport, Keys(self.shared_name))) + clauses
            except RedisAccError as error:
                logger.debug("%s: %s", self.shared_name, error)
        return "; ".join(filter(None, clauses))

    def apply(
        self, gradient: Any, *, weight: float = 1.0, metrics: Mapping[str, SupportsFloat] | None = None
    ) -> ApplyResult:
        """Applies the gradient of this worker for the current step of ``steps()``.

        Blocks for a round trip, and waits through an outage. However often the call is repeated, by this process or by
        another one with this number, one gradient counts: the first.

        Args:
            gradient: a tree like the parameters, as ``TreeAccumulator.apply_grad`` takes it. If the parameters are a
                single array: an array, or for a sparse one ``IndexedSlices`` or a tuple of indices and values. It must
                not be written to before the next step.
            weight: factor applied to the gradient, and its share in the mean: a number in [1.2e-38,
                3.4e38], such as the number of examples whose mean the gradient is. Integer dtypes accept 1 only.
            metrics: numbers that travel with the gradient, such as its loss: a dict of at most 32 names, each of up to
                64 ASCII letters, digits and ``_ . / -``, and of 768 bytes as text. The chief gets their means by
                weight, over those gradients of the step that have them.

        Returns:
            The result. Its ``outcome`` is "applied"; "repeated" if the round has a gradient of this worker; or "stale"
            if the round has been taken. The loop continues in all three cases.

        Raises:
            InvalidArgumentError: the gradient is invalid, and the message names the first path where that is so; or the
                weight is.
            NotFiniteError: with ``finite=True``, if an element is NaN or infinite. Another gradient may follow.
            ConflictError: another process has this worker's number now.
            NotFoundError: the training was deleted.
            ServerUnavailableError: the server did not answer for longer than ``patience``.
            RedisAccError: any other error of ``apply_grad``.
        """
        step = self._step
        if step is None:
            raise InvalidArgumentError("apply() needs the step of a loop over steps()")
        self._check_lease()
        self._upload.end()
        result = self._apply(gradient, weight, metrics, step)
        self._gradient, self._weight, self._metrics, self._has_applied = gradient, weight, metrics, True
        return result

    def begin(self) -> Upload:
        """Begins the upload of this worker's gradient for the current step of ``steps()``, leaf by leaf.

        The first call opens the accumulator; others do not block. An upload that was begun before and has not been
        committed is abandoned, as it is when the loop continues, or by ``apply``.

        Returns:
            The upload, to which leaves are put, and which is then committed.

        Raises:
            InvalidArgumentError: there is no step.
            ConflictError, NotFoundError, ServerUnavailableError: as for ``apply``.
        """
        step = self._step
        if step is None:
            raise InvalidArgumentError("begin() needs the step of a loop over steps()")
        self._check_lease()
        self._upload.end()
        what = "to open the accumulator"
        while True:
            try:
                gradients = self._patience.call(self._gradients, what)
                break
            except NotFoundError as error:
                found_gone = error
                self._wait_until_restored(found_gone)
        spec = None
        if isinstance(gradients, TreeAccumulator):
            spec = gradients._spec
            self._patience.call(lambda: self._upload.begin(gradients, step), "to begin an upload")
        streamed = self._upload.streamed

        def commit(
            gradient: Any, missing: str, weight: float, metrics: Mapping[str, SupportsFloat] | None
        ) -> ApplyResult:
            if step != self._step or (streamed is not None and streamed is not self._upload.streamed):
                raise InvalidArgumentError(f"the upload of the gradient of step {step} has ended: begin another one")
            self._check_lease()
            try:
                result = self._apply(gradient, weight, metrics, step, upload=self._upload, missing=missing)
            finally:
                self._upload.end()
            if not missing:
                self._gradient, self._weight, self._metrics, self._has_applied = gradient, weight, metrics, True
            return result

        return Upload(spec, streamed, commit, partial(self._upload.end_if, streamed))

    def as_encoded(self, gradient: Any, *, weight: float = 1.0) -> Any:
        """Returns a gradient as the round gets it: the same, rounded if it travels encoded (``encoding``).

        The difference is the loss of the encoding. A worker may add it to its next gradient if ``apply`` was successful
        (error feedback). Nothing is sent, but the first call opens the accumulator.

        Args:
            gradient: as for ``apply``.
            weight: as for ``apply``. The result is not multiplied by it, but a small gradient that has one may be
                buffered, and then travels encoded.

        Returns:
            A tree like the chief's gradients, an array, or ``IndexedSlices``, in memory of its own.

        Raises:
            InvalidArgumentError: the gradient is invalid.
            NotFoundError: the training does not exist, or was deleted.
            ServerUnavailableError: the server did not answer for longer than ``patience``.
        """
        gradients = self._patience.call(self._gradients, "to open the accumulator")
        return gradient_as_encoded(gradients, gradient, weight)

    def _apply(
        self,
        gradient: Any,
        weight: float,
        metrics: Mapping[str, SupportsFloat] | None,
        step: int,
        *,
        upload: OpenUpload | None = None,
        missing: str = "",
    ) -> ApplyResult:
        what = f"to apply the gradient of step {step}"
        is_restored = False
        while True:
            try:
                if is_restored:
                    published = self._patience.call(self._parameters.step, "to read the step")
                    if self._step is None or published is None or published < step:
                        # The gradient belongs to parameters that nobody continues. The loop gets others.
                        return ApplyResult("stale", published or 0, 0)
                return self._patience.call(
                    lambda: self._apply_once(gradient, weight, metrics, step, upload=upload, missing=missing), what
                )
            except NotFoundError as error:
                found_gone = error
                self._wait_until_restored(found_gone)
                is_restored = True
            except (DataLossError, StaleSequenceError) as error:
                # The handle has noticed that the server lost something. Applying it again cannot count it twice.
                self._warn("%s", error)

    def _apply_once(
        self,
        gradient: Any,
        weight: float,
        metrics: Mapping[str, SupportsFloat] | None,
        step: int,
        *,
        upload: OpenUpload | None,
        missing: str,
    ) -> ApplyResult:
        gradients = self._gradients()
        if upload is not None and upload.streamed is not None:
            return upload.commit(gradient, weight, metrics, missing)
        if missing:
            # The upload was over, and is lost now.
            return ApplyResult("stale", gradients.global_step(), gradients.num_accumulated())
        return apply_gradient(gradients, gradient, weight, step, metrics)

    def _gradients(self) -> Any:
        """Returns the accumulator, and opens it first if it is not open yet.

        Raises:
            NotFoundError: the training was deleted or lost, or another one has its name now.
        """
        if self._accumulator is None:
            # The chief creates the accumulator before it publishes parameters.
            opened = open_existing(
                Keys(self.shared_name),
                redis=self._redis,
                worker=self._place,
                encoding=self._encoding,
                finite=self._finite,
            )
            with ExitStack() as on_failure:
                on_failure.callback(opened.close)
                # A gradient must not reach the accumulator of another training that was begun under this name since.
                self._parameters.step()
                on_failure.pop_all()
            self._accumulator = self._opened.enter_context(opened)
            self._opened.callback(self._upload.end)
        return self._accumulator
