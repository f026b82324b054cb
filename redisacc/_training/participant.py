"""The common base of a chief and a worker: a place in a run, held under a lease, and patience with the server.

A server that refuses writes for the time being, because its disk or its memory is full or its replicas are gone, is
waited for in the same way as one that does not answer.
"""

from __future__ import annotations

import math
import os
import secrets
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, Self, TypeVar

from redisacc._arrays import validation
from redisacc._clock import durations, running_time
from redisacc._handles.base import host_and_process
from redisacc._handles.environment import Place, is_started_again
from redisacc._handles.parameters import Parameters
from redisacc._log import warn
from redisacc._protocol.leases.crew import Crew, Lease
from redisacc._protocol.waiting.lifetime import Closing
from redisacc._wire.connect import connect
from redisacc._wire.faults import WritesRefusedError
from redisacc._wire.transport import LIMITS, Limits
from redisacc._wire.waits import Waits
from redisacc.errors import OutcomeUnknownError, ServerUnavailableError

Value = TypeVar("Value")


class Patience:
    """How long every call of a loop waits for a server that does not answer.

    An outage of a few seconds is not logged. One that lasts is logged when that is clear, and when it ends.

    Args:
        seconds: how long, 0 or more; None means forever. A server that answers always gets the time for its answer.
        name: the name of the run, for log records.
        waits: how it pauses.
    """

    def __init__(self, seconds: float | None, name: str, waits: Waits) -> None:
        self._seconds = seconds = math.inf if seconds is None else seconds
        self._name = name
        self._waits = waits
        self._limits = Limits(call=min(max(seconds, durations.last_poll), durations.poll), outage=seconds)

    def call(self, attempt: Callable[[], Value], what: str, *, in_steps: bool = False) -> Value:
        """Returns the result of ``attempt``, which is repeated while the server does not answer.

        Args:
            attempt: may be repeated without harm.
            what: the purpose of the attempt, for log records, as in "to publish step 7".
            in_steps: whether the attempt consists of several requests, so that it begins again at the first one. If
                not, and it raises OutcomeUnknownError, that error's ``settle`` takes its place.

        Raises:
            ServerUnavailableError: the server did not answer in time. The message says why.
        """
        token = LIMITS.set(self._limits)
        try:
            return self._repeated(attempt, what, in_steps)
        finally:
            LIMITS.reset(token)

    def opening(self, attempt: Callable[[], Value], what: str) -> Value:
        """Returns the result of ``attempt``, the first call to the server.

        A process that follows another one in its place is patient: the run has seen its server. For a first one,
        the address may be wrong.
        """
        return self.call(attempt, what, in_steps=True) if is_started_again() else attempt()

    def _repeated(self, attempt: Callable[[], Value], what: str, in_steps: bool) -> Value:
        failures, said = 0, ""
        # When the first attempt began that failed. A wait that was well for hours and then fails has been patient
        # itself: see ``Limits``.
        began = 0.0
        while True:
            tried = running_time()
            try:
                result = attempt()
            except (ServerUnavailableError, WritesRefusedError) as error:
                failures += 1
                if failures == 1:
                    began = tried
                pause = min(0.1 * failures, 1.0)
                if running_time() + pause - began >= self._seconds:
                    raise
                if isinstance(error, OutcomeUnknownError) and not in_steps:
                    attempt = error.settle
                cause = "could not reach the server %s; trying until it is back: %s"
                if isinstance(error, WritesRefusedError):
                    cause = "the server refuses writes; trying %s until it accepts them: %s"
                if cause != said:
                    said = cause
                    warn(self._name, cause, what, error)
                self._waits.sleep(pause)
                continue
            if failures:
                warn(self._name, "the server is back")
            return result


class Participant(Closing):
    """The chief or a worker of a run. Closing it closes everything in ``_opened``.

    Args:
        role: "chief" or "worker".
        shared_name: the name of the run.
        here: the place of this process in a run.
        redis: the way to the server.
        patience: for how many seconds every call waits while the server does not answer. None means forever.
        encoding: how the elements of float32 of published parameters are stored.
        partitions: among how many slots of a Redis Cluster parameters are spread.
        min_replicas: how many replicas have to confirm published parameters.
    """

    _place: str
    _lease: Lease

    def __init__(
        self,
        role: str,
        shared_name: str,
        here: Place,
        *,
        redis: object,
        patience: float | None,
        encoding: Literal["float32", "bfloat16"] | None = None,
        partitions: int | Literal["auto"] | None = None,
        min_replicas: int = 0,
    ) -> None:
        seconds = validation.timeout(patience, "patience")
        self.shared_name = validation.text(shared_name, "shared_name", max_bytes=512)
        self._transport = connect(redis)
        self._patience = Patience(seconds, self.shared_name, self._transport.waits)
        who = host_and_process(os.getpid())
        self._opened = ExitStack()
        opens = partial(
            Parameters,
            shared_name,
            redis=redis,
            encoding=encoding,
            partitions=partitions,
            min_replicas=min_replicas,
            publisher=f"{role} {who}",
        )
        self._parameters = self._opened.enter_context(self._patience.opening(opens, "to open the run"))
        self._crew = Crew(self._transport, self.shared_name, holder=here.run_id or secrets.token_hex(8), who=who)
        # The next process of this place need not wait for the lease, also without ``with``.
        weakref.finalize(self, self._opened.close)

    @classmethod
    def _of_training(cls, shared_name: str, options: Any) -> Self:
        """Returns the chief or the worker of a ``Training``. The constructor looks at the environment as well."""
        made = cls.__new__(cls)
        made._take_part(shared_name, options)
        return made

    def _take_part(self, shared_name: str, options: Any) -> None:
        raise NotImplementedError

    @contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _keep(self, place: str) -> None:
        """Extends the lease of a place, which was taken a moment ago, until this is closed."""
        self._place = place
        parameters = self._parameters
        # It must not keep this object alive, which gives it back at its end.
        self._lease = Lease(self._crew, place, lambda: parameters._reader.incarnation)
        self._opened.callback(self._lease.give_back)

    def _check_lease(self) -> None:
        self._patience.call(self._lease.check, f"to extend the lease of the {self._place}")

    def _warn(self, text: str, *values: object) -> None:
        warn(self.shared_name, text, *values)

    def close(self) -> None:
        """Closes the handles, and gives the lease back. The run can be continued. Closing twice does nothing."""
        self._opened.close()
