"""The common base of a chief and a worker: a place in a training, held under a lease, and patience with the server."""

from __future__ import annotations

import logging
import os
import secrets
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Literal

from redisacc._arrays import validation
from redisacc._handles.base import host_and_process
from redisacc._handles.environment import Place
from redisacc._handles.parameters import Parameters
from redisacc._protocol.leases.crew import Crew, Lease
from redisacc._protocol.waiting.lifetime import Closing
from redisacc._training.patience import Patience
from redisacc._wire.connect import connect

logger = logging.getLogger("redisacc")


class Participant(Closing):
    """The chief or a worker of a training. Closing it closes everything in ``_opened``.

    Args:
        role: "chief" or "worker".
        shared_name: the name of the training.
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
        self._parameters = self._opened.enter_context(self._patience.opening(opens, "to open the training"))
        self._crew = Crew(self._transport, self.shared_name, holder=here.run_id or secrets.token_hex(8), who=who)
        # The next process of this place need not wait for the lease, also without ``with``.
        weakref.finalize(self, self._opened.close)

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
        logger.warning(f"%s: {text}", self.shared_name, *values, extra={"accumulator": self.shared_name})

    def close(self) -> None:
        """Closes the handles, and gives the lease back. The training can be continued. Closing twice does nothing."""
        self._opened.close()
