"""A worker of a run: it gets the parameters of each step, and applies a gradient."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, SupportsFloat, TypeVar

from redisacc._arrays import validation
from redisacc._arrays.encodings import Encoding
from redisacc._arrays.metrics import Means
from redisacc._arrays.results import ApplyResult
from redisacc._arrays.weights import checked_weight
from redisacc._clock import clock, durations
from redisacc._format.keys import Keys, ParameterKeys
from redisacc._handles import exit_code
from redisacc._handles.environment import MAX_WORKERS, Place, place
from redisacc._handles.existing import open_existing
from redisacc._handles.tree import TreeAccumulator
from redisacc._protocol.leases.process_identity import fate_of
from redisacc._protocol.parameters.ahead import PartsAhead
from redisacc._protocol.parameters.announcements import is_concluded_by, read_workers
from redisacc._protocol.parameters.marks import whereabouts
from redisacc._protocol.parameters.reader import ParameterReader
from redisacc._protocol.rounds.who_contributed import (
    contributors_of_round,
    has_contributed,
    read_contributors,
    states_text,
)
from redisacc._protocol.scripts import StaleSequenceError
from redisacc._protocol.waiting.wait import WaitLog, until
from redisacc._text import shown
from redisacc._training.decision import Found, Next, next_of_follower
from redisacc._training.gradients import has_no_gradients, no_gradient, warn_of_skip
from redisacc._training.loss import Claimant
from redisacc._training.options import SKIP, Finite, checked_finite
from redisacc._training.participant import Participant
from redisacc._training.upload import Given, Upload
from redisacc.errors import (
    CancelledError,
    DataLossError,
    FinishedError,
    InvalidArgumentError,
    NotFiniteError,
    NotFoundError,
    RedisAccError,
)

logger = logging.getLogger("redisacc")

Value = TypeVar("Value")

# A worker looks less and less often whether its gradient is still there, but at least this often, in seconds: the
# server may lose it after a long wait, too.
LOOK_AT_LEAST_EVERY = 30.0


# How often a worker asks for the number of workers before there is a chief, in seconds.
ASK_EVERY = 0.2

# How often a worker asks whether a finished training is continued, in seconds.
ASK_FINISHED_EVERY = 0.1


class Beside(Protocol):
    """The run of which a worker is a part, beside a thread that may lead."""

    # The step with which its loop ends, and the error of that thread.
    _until: int | None
    _failure: BaseException | None

    def _raise_failure(self) -> None:
        """Raises that error, if there is one."""

    def _restores(self, step: int) -> bool:
        """Returns whether that thread has a version after this step, and publishes it again."""

    def meanwhile(self) -> None:
        """Does what is to be done once a second while this worker waits for the next step."""


@dataclass(frozen=True)
class FollowOptions:
    """What a worker is told. ``Worker`` describes most of it.

    Attributes:
        number: its number; None means the one of its predecessor, or the lowest that is free.
        redis: the way to the server.
        encoding: how its gradients travel.
        finite: what it does with a gradient that holds NaN or an infinity.
        patience: for how many seconds to wait for a silent server; None means forever.
        here: the place of this process in a run.
        beside: the run of which it is a part; None means it is a worker by itself.
    """

    number: int | None
    redis: object
    encoding: Encoding | None
    finite: Finite
    patience: float | None
    here: Place
    beside: Beside | None = None


class Worker(Participant):
    """A worker of a run: for each step it gets the parameters, and applies a gradient.

    Workers may join, leave, fail and return at any moment. Each holds a number under a lease, which determines its
    share of the data. It counts once per step, even while two processes have the same number.

    Example:
        See ``Chief`` for a complete one. Closing a worker frees its number:

        >>> import redisacc
        >>> with redisacc.Worker("docs-worker") as first, redisacc.Worker("docs-worker") as second:
        ...     first.number, second.number
        (0, 1)
        >>> with redisacc.Worker("docs-worker") as third:
        ...     third.number
        0

    Args:
        shared_name: the name of the run.
        number: the number of this worker, from 0. None means the environment variable ``REDISACC_WORKER_NUMBER``, which
            `redisacc run` sets; else the number of the predecessor with the same ``REDISACC_RUN_ID``; else the lowest
            free one.
        redis: a redis-py or valkey-py client, a URL, or None, as for ``ConditionalAccumulator``.
        encoding: how the float32 elements of this worker's gradients are sent: "float32" (or None), "bfloat16" or
            "int8", as for ``ConditionalAccumulator``. Workers may differ.
        finite: what happens to a gradient that holds NaN or an infinity. "skip": the step continues without it, as with
            ``skip``, and a warning says so. It is the default, because one such gradient would permanently make all
            weights NaN, and if it were refused, the others would wait. True: ``apply`` raises NotFiniteError; another
            gradient may follow, and if the loop continues without one, this worker skips the step. False: nothing is
            checked, which saves one more pass over each gradient.
        patience: for how many seconds every call waits while the server does not answer. None means forever. An outage
            of more than a few seconds is logged when it is noticed and when it ends. If no server answers at the start,
            an error is raised after a few seconds.

    Attributes:
        shared_name: the name of the run.
        number: the number of this worker.
        workers: the number of workers that share the data.

    Raises:
        InvalidArgumentError: an argument or a variable of the environment is invalid, or this process is the chief.
        ConflictError: another process has this number. Its predecessor may still have it: if it was a process of this
            machine and has ended, its lease is taken over at once; otherwise, this waits up to 10 seconds for the lease
            to end.
        ServerUnavailableError: no server answers.
    """

    def __init__(
        self,
        shared_name: str,
        *,
        number: int | None = None,
        redis: object = None,
        encoding: Encoding | None = None,
        finite: Finite = "skip",
        patience: float | None = None,
    ) -> None:
        here = place()
        if here.role == "chief":
            raise InvalidArgumentError("the environment says that this process is the chief, so it cannot be a worker")
        self._take_part(shared_name, FollowOptions(number, redis, encoding, finite, patience, here))

    def _take_part(self, shared_name: str, options: FollowOptions) -> None:
        """Begins to work. Blocks until this process has a number."""
        here, number = options.here, options.number
        given = here.number if number is None else validation.integer(number, "number", low=0, high=MAX_WORKERS - 1)
        checked_finite(options.finite)
        super().__init__("worker", shared_name, here, redis=options.redis, patience=options.patience)
        self._options, self._beside = options, options.beside
        with self._closed_on_failure():
            self.number = self._patience.call(lambda: self._take_number(given), "to get a number", in_steps=True)
            self._keep(f"worker {self.number}")
        self._ahead = PartsAhead(self._transport)
        self._opened.callback(self._ahead.close)
        self._parameters._reader.fetch_ahead(self._ahead)
        self._accumulator: TreeAccumulator | None = None
        self._claimant = Claimant(self._transport, self._parameters, self._place)
        self._lease.on_missing = self._claimant.claim_quietly
        # The step of the parameters that the loop got last; and what was applied in it.
        self._step: int | None = None
        self._applied: Given | None = None
        # The value that the program keeps, as text, until it is published; and whether a gradient of this step has it.
        self._pending, self._has_sent = "", False
        # Whether a gradient of this step was refused because of NaN; and how many were skipped for that.
        self._has_refused, self._skipped = False, 0
        self._next_check = self._next_look = 0.0
        self._pause = durations.look_after
        self._went_back = False
        # Whether the server has lost the gradient of this step for sure.
        self._has_lost_gradient = False
        # Among how many workers the data is shared, as the chief announced for this step; None means it was not read
        # yet.
        self._workers: int | None = None
        self._has_warned = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shared_name!r}, number={self.number})"

    def _take_number(self, given: int | None) -> int:
        if given is None:
            return self._crew.take_number()
        self._crew.wait_for(f"worker {given}")
        return given

    @property
    def _latest(self) -> tuple[int, Any, ParameterReader] | None:
        """The step and the parameters that this worker has got last, and what has read them."""
        latest = self._claimant.latest
        return None if latest is None else (*latest, self._parameters._reader)

    @property
    def workers(self) -> int:
        """The number of workers, as announced by the chief.

        Use it to choose the worker's share of the data: ``data[worker.number :: worker.workers]``. A worker with a
        higher number has no share; a warning says so once.

        Blocks for a round trip, or until a chief has begun the run. In a loop over ``steps()``, it is read at most once
        per step.

        Raises:
            ConflictError: another process has this worker's number now.
            NotFoundError: the run was deleted.
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
        keys = ParameterKeys(self.shared_name)
        found = until(
            self._transport.waits,
            lambda: read_workers(self._transport, keys),
            every=ASK_EVERY,
            check=self._lease.check,
            describe=lambda: (
                f"{self.shared_name}: still waiting for a chief to say how many workers there are; {self._crew.text()}"
            ),
            name=self.shared_name,
        )
        assert found is not None
        return found

    def steps(self) -> Iterator[tuple[int, Any]]:
        """Yields each step and its parameters, for a loop that computes a gradient and applies it.

        Blocks until the parameters of a later step are published; after 5 seconds, and then less often, a log message
        names the workers that are expected, late or gone. If this worker is slow, it may miss steps. The loop ends when
        the chief finishes the run; if the run is finished already, it ends at once, unless a chief that was started
        together with this worker may still continue it. The last parameters are not yielded, because they need no
        gradient; ``Parameters(shared_name).latest()`` returns them.

        Yields:
            The step, and the parameters as a tree of read-only arrays.

        Raises:
            ConflictError: another process has this worker's number now, because this one stalled for too long.
            NotFoundError: the run was deleted.
            ServerUnavailableError: the server did not answer for longer than ``patience``.
        """
        if self._is_finished():
            return
        log: WaitLog | None = None
        while True:
            self._check_lease()
            if self._has_refused and self._applied is None:
                # The program has gone on to the next step. Without this, the others would wait for it.
                self.skip()
            try:
                step, tree = self._made(self._wait, "to wait for parameters")
            except FinishedError:
                # A leader must not wait for what this process never publishes.
                self._claimant.is_over = True
                return
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
            self._end_upload()
            if self._step is not None:
                exit_code.advanced()
            if self._has_sent:
                self._pending, self._has_sent = "", False
            self._step, self._applied, self._has_refused = step, None, False
            self._claimant.latest, self._claimant.is_over = (step, tree), False
            # Another chief may need another number.
            self._workers = None
            yield step, tree

    def _made(self, attempt: Callable[[], Value], what: str) -> Value:
        """Returns the result of an attempt, which is made again when a run that the server has lost is restored.

        Raises:
            NotFoundError: the run, or its accumulator alone, was deleted.
        """
        while True:
            try:
                return self._patience.call(attempt, what)
            except NotFoundError as error:
                gone = error
            self._wait_until_restored(gone)

    def _wait_until_restored(self, gone: NotFoundError) -> None:
        """Blocks until what is there can be worked with, and goes on with that."""
        try:
            action = self._next(gone)
        except BaseException:
            self._claimant.withdraw()
            raise
        if action is Next.BEGIN_AGAIN:
            self._warn("a chief has begun this run again from other parameters; continuing with those")
            self._parameters._forget()
            self._step = None
        # The accumulator is another one.
        if self._accumulator is not None:
            self._accumulator.close()
            self._accumulator = None
        self._has_lost_gradient = True
        if self._beside is not None:
            # It looks for other losses.
            with suppress(NotFoundError):
                self._patience.call(self._beside.meanwhile, "to look at what was restored")

    def _next(self, gone: NotFoundError) -> Next:
        """Blocks until what is there can be worked with; in the meantime, claims what this worker has."""
        log, is_said = WaitLog(clock.now()), False
        give_up = clock.now() + durations.replaced_within
        while True:
            found = self._patience.call(self._look, "to look for the run")
            found.has_waited = clock.now() >= give_up
            action = next_of_follower(found)
            if action is Next.END:
                raise gone
            if action is not Next.WAIT:
                return action
            if not (found.is_there or is_said):
                is_said = True
                self._warn(
                    "the server has lost this run: it was flushed, or restarted without its data. Waiting for a "
                    "chief to restore it"
                )
            self._check_lease()
            if log.is_due(clock.now()):
                self._warn("still waiting for a chief to restore this run; %s", self._crew.text())
            self._transport.waits.sleep(ASK_EVERY if found.is_there else durations.look_every)

    def _look(self) -> Found:
        """Looks at what there is, and claims, or publishes, what this worker has if there is nothing."""
        keys, incarnation = ParameterKeys(self.shared_name), self._parameters._reader.incarnation
        found = Found(is_deleted=whereabouts(self._transport, keys, incarnation) == "deleted")
        if not found.is_deleted and self._claimant.look():
            try:
                found.is_there = self._parameters.step() is not None
            except NotFoundError:
                # Unless the server has lost them again.
                there = whereabouts(self._transport, keys, incarnation)
                found.is_there = found.is_other = there in ("deleted", "replaced")
        found.has_gradients = found.is_there and not has_no_gradients(self._transport, self.shared_name)
        return found

    def _is_finished(self) -> bool:
        """Returns whether the run is finished. If a chief may be about to continue it, waits for that.

        A program that may lead knows the last step. Else, the chief of this worker's run says what it does, and for
        another one, this waits a moment.
        """
        began, here = clock.now(), self._options.here
        log = WaitLog(began)
        while self._made(self._parameters.finished, "to read the parameters"):
            if self._beside is not None:
                step, until = self._made(self._parameters.step, "to read the step"), self._beside._until
                if until is None or step is None or step >= until:
                    return True
            elif here.chief_run_id is None:
                members = self._patience.call(self._crew.members, "to look for the chief")
                chief = any(member.number is None and member.left > 0 for member in members)
                if not (chief or here.role) or clock.now() - began >= durations.continued_within:
                    return True
            elif self._patience.call(
                partial(is_concluded_by, self._transport, ParameterKeys(self.shared_name), here.chief_run_id),
                "to read the parameters",
            ):
                return True
            elif log.is_due(clock.now()):
                self._warn("the run is finished; still waiting for the chief, which may continue it")
            self._check_lease()
            self._transport.waits.sleep(ASK_FINISHED_EVERY)
        return False

    def _check_lease(self) -> None:
        if self._beside is not None:
            self._beside._raise_failure()
        super()._check_lease()

    def _wait(self) -> tuple[int, Any]:
        self._next_check = clock.now() + durations.look_every
        self._pause = durations.look_after
        self._next_look = clock.now() + (0.0 if self._has_lost_gradient else self._pause)
        self._has_lost_gradient = False
        return self._parameters.wait(self._step, skip_last=True, cancel=self._is_over, describe=self._describe)

    def _is_over(self) -> bool:
        """Looks, once a second, whether waiting for the next step still makes sense."""
        if self._beside is not None and self._beside._failure is not None:
            return True
        now = clock.now()
        if now < self._next_check:
            return False
        self._next_check = now + durations.look_every
        if self._lease.lost:
            return True
        if self._step is None:
            return False
        if self._beside is not None:
            self._beside.meanwhile()
        published = self._parameters.step()
        if published is not None and published < self._step:
            self._went_back = not (self._beside and self._beside._restores(published))
            return self._went_back
        if self._applied is not None and now >= self._next_look:
            self._pause = min(2 * self._pause, LOOK_AT_LEAST_EVERY)
            self._next_look = now + self._pause
            self._look_after_gradient(self._applied, self._step)
        return False

    def _look_after_gradient(self, given: Given, step: int) -> None:
        """Applies the gradient of a step again if the server has lost it."""
        # In this order: if the round is taken between the two, the step has moved on.
        is_there = has_contributed(self._transport, Keys(self.shared_name), self._place)
        if not is_there and self._gradients().global_step() <= step:
            self._warn(
                "the gradient of step %s is not in the round, because the server has lost it; applying it again",
                step,
            )
            self._apply(given, step)

    def _describe(self) -> str | None:
        """Returns None if another process on this machine says the same: each of a hundred would say it otherwise."""
        clauses = [self._crew.text()]
        if self._step is not None and self._applied is None:
            clauses.append(
                f"this process has applied no gradient of step {self._step}: if others wait for it, call skip() before "
                "the loop continues"
            )
        try:
            # Once the round of this step is taken, this worker waits for the chief, and not for other workers.
            if self._accumulator is not None and (self._step is None or self._accumulator.global_step() <= self._step):
                if self._beside is not None and self._applied is not None and self._is_said_by_another():
                    return None
                clauses = states_text(read_contributors(self._transport, Keys(self.shared_name))) + clauses
        except RedisAccError as error:
            logger.debug("%s: %s", self.shared_name, error)
        return "; ".join(filter(None, clauses))

    def _is_said_by_another(self) -> bool:
        """Returns whether the process that leads says what is missing, or a waiting one with a lower number does."""
        in_round = contributors_of_round(self._transport, Keys(self.shared_name))
        return any(
            member.number is None or (member.number < self.number and member.place in in_round)
            for member in self._crew.members()
            # Known to live, so it is on this machine, and writes to the same terminal or log.
            if member.left > 0 and fate_of(member.process) == "alive"
        )

    def apply(
        self, gradient: Any, *, weight: float = 1.0, metrics: Mapping[str, SupportsFloat] | None = None
    ) -> ApplyResult:
        """Applies the gradient of this worker for the current step of ``steps()``.

        Blocks for a round trip, and waits through an outage. If the call is repeated, by this process or by another one
        with this number, only the first gradient counts.

        Args:
            gradient: a tree like the parameters, as ``TreeAccumulator.apply_grad`` takes it. Do not write to it before
                the next step.
            weight: factor applied to the gradient, and its share in the mean: 0 to leave it out, as ``skip`` does; else
                a number in [1.2e-38, 3.4e38], such as the number of examples whose mean the gradient is. Integer dtypes
                accept 1 only, and 0 in sums.
            metrics: numbers that are sent with the gradient, such as its loss: a dict of at most 32 names, each of up
                to 64 ASCII letters, digits and ``_ . / -``, and of 768 bytes as text. The chief gets their means by
                weight, over those gradients of the step that have them.

        Returns:
            The result. Its ``outcome`` is "applied"; "repeated" if the round has a gradient of this worker; "stale" if
            the round has been taken; or "skipped", with weight 0 or because of NaN. In all cases, continue with the
            loop.

        Raises:
            InvalidArgumentError: the gradient is invalid, and the message names the first path that is; or the weight
                is invalid.
            NotFiniteError: with ``finite=True``, if an element is NaN or infinite. Another gradient may follow.
            ConflictError: another process has this worker's number now.
            NotFoundError: the run was deleted.
            ServerUnavailableError: the server did not answer for longer than ``patience``.
            RedisAccError: any other error of ``apply_grad``.
        """
        step = self._started("apply()")
        given = Given(gradient, weight, metrics)
        return self._kept(given, lambda: self._apply(given, step))

    def skip(self) -> ApplyResult:
        """Ends the current step of ``steps()`` without a gradient of this worker: the step does not wait for it.

        The mean is over the other gradients, with the same bits as without this worker, unless ``Mean(by="count")``
        divides it by the number of workers. If every worker skips, weights and state stay as they are, and the step
        counts. For a ``quorum``, a skip counts as a gradient. Blocks as ``apply`` does, and sends as many bytes: zeros
        for dense leaves, with the smallest weight.

        Returns:
            The result. Its ``outcome`` is "skipped"; or as for ``apply``, if this worker is late or has applied before.

        Raises:
            InvalidArgumentError: there is no step; or each gradient counts, in a mean of integers.
            RedisAccError: as ``apply``.
        """
        step = self._started("skip()")
        nothing, weight = self._made(lambda: no_gradient(self._gradients()._spec), "to open the accumulator")
        given = Given(nothing, weight, None)
        result = self._apply(given, step)
        self._applied = given
        return replace(result, outcome="skipped") if result else result

    def _started(self, call: str) -> int:
        """Returns the current step, in which a call begins that sends a gradient."""
        if self._step is None:
            raise InvalidArgumentError(f"{call} needs the step of a loop over steps()")
        self._check_lease()
        self._end_upload()
        return self._step

    def _kept(self, given: Given, apply: Callable[[], ApplyResult]) -> ApplyResult:
        """Applies a gradient and keeps it, in case that the server loses it; or skips the step."""
        if not checked_weight(given.weight, or_zero=True):
            return self.skip()
        try:
            result = apply()
        except NotFiniteError as error:
            self._has_refused = True
            if self._options.finite != SKIP:
                raise
            self._skipped += 1
            warn_of_skip(self.shared_name, self._step or 0, self._skipped, error)
            return self.skip()
        self._applied = given
        return result

    def begin(self) -> Upload:
        """Begins the upload of this worker's gradient for the current step of ``steps()``, leaf by leaf.

        The first call opens the accumulator; others do not block. An earlier upload that was not committed is
        abandoned. Continuing the loop and ``apply`` abandon it, too.

        Returns:
            The upload: put each leaf, and then commit it.

        Raises:
            InvalidArgumentError: there is no step.
            ConflictError, NotFoundError, ServerUnavailableError: as for ``apply``.
        """
        step = self._started("begin()")
        gradients = self._made(self._gradients, "to open the accumulator")
        streamed = self._patience.call(lambda: gradients._begin(step), "to begin an upload")

        def commit(given: Given) -> ApplyResult:
            if step != self._step or streamed is not gradients._upload:
                raise InvalidArgumentError(f"the upload of the gradient of step {step} has ended: begin another one")
            self._check_lease()

            def apply() -> ApplyResult:
                try:
                    return self._apply(given, step, streams=True)
                finally:
                    gradients._abandon()

            return self._kept(given, apply)

        return Upload(gradients._spec, streamed, commit, partial(gradients._abandon, streamed))

    def _end_upload(self) -> None:
        if self._accumulator is not None:
            self._accumulator._abandon()

    def as_encoded(self, gradient: Any, *, weight: float = 1.0) -> Any:
        """Returns a gradient as the round gets it: the same, or rounded if ``encoding`` applies.

        The difference is the error of the encoding. You may add it to the worker's next gradient if ``apply`` was
        successful (error feedback). Nothing is sent, but the first call opens the accumulator.

        Args:
            gradient: as for ``apply``.
            weight: as for ``apply``. The result is not multiplied by it, but a small gradient with a weight may be
                buffered, and is then encoded.

        Returns:
            A tree like the chief's gradients, in its own memory.

        Raises:
            InvalidArgumentError: the gradient is invalid.
            NotFoundError: the run does not exist, or was deleted.
            ServerUnavailableError: the server did not answer for longer than ``patience``.
        """
        gradients = self._made(self._gradients, "to open the accumulator")
        return gradients.as_encoded(gradient, weight=weight)

    def _keep_text(self, text: str) -> None:
        """Sends what the program keeps with the next gradient."""
        self._pending, self._has_sent = text, False

    def _apply(self, given: Given, step: int, *, streams: bool = False) -> ApplyResult:
        if self._pending and isinstance(given.metrics, Mapping | None):
            metrics: Any = Means(given.metrics or {})  # type: ignore[arg-type]
            metrics.kept, metrics.digest = self._pending, getattr(given.metrics, "digest", "")
            given = given._replace(metrics=metrics)
        result = self._applied_to_round(given, step, streams=streams)
        self._has_sent = bool(self._pending) and result.outcome != "stale"
        return result

    def _applied_to_round(self, given: Given, step: int, *, streams: bool) -> ApplyResult:
        def attempt() -> ApplyResult:
            gradients = self._gradients()
            if streams and gradients._upload is not None:
                return gradients._commit(*given)
            return gradients.apply_grad(given.gradient, step, weight=given.weight, metrics=given.metrics)

        while True:
            try:
                return self._patience.call(attempt, f"to apply the gradient of step {step}")
            except NotFoundError as error:
                gone = error
            except (DataLossError, StaleSequenceError) as error:
                # The handle has noticed that the server lost something. Applying it again cannot count it twice.
                self._warn("%s", error)
                continue
            self._wait_until_restored(gone)
            published = self._made(self._parameters.step, "to read the step")
            if self._step is None or published is None or published < step:
                # The gradient belongs to parameters that nobody continues. The loop gets others.
                return ApplyResult("stale", published or 0, 0)

    def _gradients(self) -> TreeAccumulator:
        """Returns the accumulator, and opens it first if it is not open yet.

        Raises:
            NotFoundError: the run was deleted or lost, or another one has its name now.
        """
        if self._accumulator is None:
            # The chief creates the accumulator before it publishes parameters.
            opened = open_existing(
                Keys(self.shared_name),
                redis=self._options.redis,
                worker=self._place,
                encoding=self._options.encoding,
                finite=bool(self._options.finite),
            )
            with ExitStack() as on_failure:
                on_failure.callback(opened.close)
                if not isinstance(opened, TreeAccumulator):
                    raise InvalidArgumentError(f"{shown(self.shared_name)} is no run: its accumulator is {opened!r}")
                # If the server goes back to older data, no round gets gradients of weights that are lost.
                opened._applier.own_step = True
                # A gradient must not reach the accumulator of another training that was begun under this name since.
                self._parameters.step()
                on_failure.pop_all()
            self._accumulator = self._opened.enter_context(opened)
        return self._accumulator
