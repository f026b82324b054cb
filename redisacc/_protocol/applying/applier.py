"""Applies gradients, and sets the global step: requests that are executed exactly once."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from itertools import chain
from typing import Any

from redisacc._arrays.encodings import Encoding, check_encodable, encode
from redisacc._arrays.gradient import Gradient
from redisacc._arrays.results import ApplyResult
from redisacc._format import in_place
from redisacc._format.crew_entries import number_of_worker
from redisacc._format.upload_layout import UploadLayout, layout_of
from redisacc._protocol.applying.attempts import Way
from redisacc._protocol.applying.gradient_writer import GradientWriter
from redisacc._protocol.applying.requests import Requests
from redisacc._protocol.applying.upload import Upload
from redisacc._protocol.scripts import COUNTED, Reply
from redisacc._protocol.sessions import GradientRequest, Request
from redisacc._text import shown
from redisacc.errors import InvalidArgumentError

logger = logging.getLogger("redisacc")

# The server itself adds gradients of up to this many elements, where each row counts for ROW_COST more. One of that
# size holds the server for just under a quarter of a millisecond. From a few hundred elements on, a gradient is applied
# faster if it is buffered, but sums in place bound the memory of a round: docs/explanations/benchmarks.md.
IN_PLACE_LIMIT = 1280

# Warn after this many stale gradients in a row without a local_step: it was probably forgotten.
STALE_IN_SUCCESSION = 10


class Applier:
    """Applies gradients to one accumulator for one handle.

    Args:
        way: how they reach the server.
        requests: sends requests exactly once.
        encoding: the encoding of float32 elements in buffered gradients.
        in_place_limit: the most elements of a gradient that is added in place; 0: every gradient is buffered. It does
            not count if sums follow the workers' numbers: in place, gradients are added when they arrive.
        staleness_weighs: whether the server multiplies gradients by a factor for their staleness.
    """

    def __init__(
        self, way: Way, requests: Requests, *, encoding: Encoding, in_place_limit: int, staleness_weighs: bool
    ) -> None:
        self._way, self._spec, self._requests = way, way.spec, requests
        self._writer = GradientWriter(way)
        self._by_worker = way.spec.order == "worker"
        self._in_place_limit = in_place_limit if in_place.can_add(way.spec) and not self._by_worker else 0
        self._staleness_weighs = staleness_weighs
        # As in ``GradientRequest``: workers of a run set it.
        self.own_step = False
        self.encoding = encoding
        # Gradients of step 0 that were dropped as stale since the last one that was not. None means there was a
        # warning.
        self._stale_of_step_0: int | None = 0

    def apply(
        self,
        gradient: Gradient,
        *,
        local_step: int,
        round_shape: tuple[int, ...],
        weight: float,
        worker: str,
        notes: str,
        label: str,
    ) -> ApplyResult:
        """Applies a gradient.

        Args:
            gradient: as the specification describes it.
            local_step: the step that it was computed for.
            round_shape: dense: its shape; sparse: the shape of its rows; tree: ().
            weight: factor applied to the gradient, before its staleness counts.
            worker: the name under which it is counted.
            notes: what is noted of it for takers, as in ``GradientRequest``.
            label: the accumulator's name in log records and errors.

        Raises:
            InvalidArgumentError: the encoding is "int8", and an element is infinite or NaN; or sums follow the workers'
                numbers, and this worker has none.
        """
        order = self._order_of(worker) if self._by_worker else ""
        has_weight = weight != 1 or self._staleness_weighs
        rows = in_place.pack_rows(gradient, self._spec, self._in_place_limit, has_weight=has_weight)
        if self.encoding != "float32":
            gradient = self._as_encoded(gradient, encodes=rows is None)
        session, sequence = self._requests.sessions.begin()
        request = GradientRequest(
            session, sequence, worker, local_step, round_shape, self.own_step, notes, weight, order
        )

        def send() -> Reply:
            if rows is not None:
                reply = self._way.scripts.apply(
                    **request.arguments(),
                    notes=request.notes,
                    sections=tuple(chain.from_iterable(rows)),
                    replicated=True,
                )
                # Otherwise, a sum would lose digits.
                if reply.outcome in COUNTED:
                    return reply
            return self._writer.buffer(gradient, request)

        return self._requests.execute(
            request, send, partial(self._result, request, label), f"{label}: to apply a gradient"
        )

    def _result(self, request: GradientRequest, label: str, counted: Reply) -> ApplyResult:
        """Turns the outcome of a request into the caller's result."""
        if counted.outcome in ("stale", "repeated"):
            logger.debug(
                "%s: dropped a gradient of step %d at step %d: %s",
                label,
                request.local_step,
                counted.global_step,
                "its step has passed" if counted.outcome == "stale" else f"the round has one of {request.worker}",
                extra={
                    "accumulator": self._way.keys.name,
                    "local_step": request.local_step,
                    "global_step": counted.global_step,
                    "num_accumulated": counted.num_accumulated,
                },
            )
            if counted.outcome == "stale" and request.local_step == 0:
                self._warn_of_step_0(counted, label)
            return ApplyResult(
                "stale" if counted.outcome == "stale" else "repeated", counted.global_step, counted.num_accumulated
            )
        if self._stale_of_step_0:
            self._stale_of_step_0 = 0
        if self._way.min_replicas:
            self._way.scripts.check_replicated(counted.replicas, "the gradient was counted")
        return ApplyResult("applied", counted.global_step, counted.num_accumulated)

    @cached_property
    def _layout(self) -> UploadLayout | None:
        """The layout of gradients that are uploaded part by part; None if they are too small, or unsuitable."""
        slots, least = max(len(self._way.keys.partitions), 1), self._way.announced_bytes
        if sum(map(math.prod, self._spec.fixed_shapes or ())) <= self._in_place_limit:
            return None
        return layout_of(self._spec, self.encoding, slots, least)

    def begin(self, *, local_step: int, worker: str) -> Upload | None:
        """Begins the upload of a gradient, whose parts leave as soon as they are complete. Sends nothing itself.

        Returns None if such gradients are only sent whole.

        Args:
            local_step: the step that it is computed for.
            worker: the name under which it will be counted.
        """
        layout = self._layout
        if layout is None:
            return None
        order = self._order_of(worker) if self._by_worker else ""
        session, sequence = self._requests.sessions.begin()
        request = GradientRequest(session, sequence, worker, local_step, (), self.own_step, order=order)
        return Upload(self._way, layout, request)

    def abandon(self, upload: Upload) -> None:
        """Ends an upload. Nothing of it is left."""
        upload.abandon()
        self._requests.sessions.give_back(upload.request.session)

    def commit(
        self,
        upload: Upload,
        whole: Callable[[], Gradient],
        *,
        weight: float,
        notes: str,
        label: str,
    ) -> ApplyResult:
        """Counts the gradient of an upload, as ``apply`` does. If the upload has failed, sends the whole gradient.

        Args:
            upload: the upload. All leaves have been put.
            whole: returns the gradient.
            weight: as for ``apply``.
            notes: as for ``apply``.
            label: as for ``apply``.
        """
        request = upload.request
        request.weight, request.notes = weight, notes
        sent: list[Gradient] = []

        def send() -> Reply:
            upload.complete()
            counted = upload.commit()
            if counted is not None:
                return counted
            if not sent:
                sent.append(encode(whole(), self.encoding, self._spec))
            return self._writer.buffer(sent[0], request)

        try:
            return self._requests.execute(
                request, send, partial(self._result, request, label), f"{label}: to apply a gradient"
            )
        finally:
            upload.close()

    def as_encoded(self, gradient: Gradient, weight: float) -> Gradient:
        """Returns a gradient as it is sent: encoded, unless it is small enough to be added in place.

        Raises:
            InvalidArgumentError: the encoding is "int8", and an element is infinite or NaN.
        """
        has_weight = weight != 1 or self._staleness_weighs
        rows = in_place.pack_rows(gradient, self._spec, self._in_place_limit, has_weight=has_weight)
        return self._as_encoded(gradient, encodes=rows is None)

    def _as_encoded(self, gradient: Gradient, *, encodes: bool) -> Gradient:
        if encodes:
            return encode(gradient, self.encoding, self._spec)
        # Whether a gradient is refused must not depend on how many elements it has.
        check_encodable(gradient, self.encoding, self._spec)
        return gradient

    def _order_of(self, worker: str) -> str:
        """Returns the place of a worker's gradients in the order of a round: its number."""
        number = number_of_worker(worker)
        if number is None:
            raise InvalidArgumentError(
                f"the gradients of {shown(self._way.keys.name)} are added in the order of their workers' numbers, but "
                f"the worker is called {shown(worker)}: name its handle 'worker N', where N is its number"
            )
        return number

    def _warn_of_step_0(self, counted: Reply, label: str) -> None:
        """Logs one warning if gradients keep arriving stale because the caller passes no local_step."""
        if self._stale_of_step_0 is None:
            return
        self._stale_of_step_0 += 1
        if self._stale_of_step_0 == STALE_IN_SUCCESSION:
            self._stale_of_step_0 = None
            logger.warning(
                "%s: the last %d gradients were dropped as stale, because they were for step 0 and the step is %d. "
                "If local_step was left out, it is 0: pass the step that the gradient was computed for",
                label,
                STALE_IN_SUCCESSION,
                counted.global_step,
                extra={"accumulator": self._way.keys.name, "local_step": 0, "global_step": counted.global_step},
            )

    def set_global_step(self, step: int, *, worker: str, label: str) -> None:
        """Sets the global step, and logs a warning if it was higher.

        Args:
            step: an int64.
            worker: the name of the sender.
            label: the accumulator's name in log records and errors.
        """

        def finish(counted: Reply) -> None:
            if counted.outcome == "lowered":
                logger.warning(
                    "%s: the global step was lowered to %d",
                    label,
                    step,
                    extra={"accumulator": self._way.keys.name, "global_step": step},
                )

        what = f"{label}: to set the global step to {step}"
        self._change("set_global_step", what, worker, finish, new_global_step=step)

    def set_quorum(self, change: Mapping[str, str], *, worker: str, label: str) -> None:
        """Changes the quorum.

        Args:
            change: what gets which value, as ``quorum_change`` returns it.
            worker: the name of the sender.
            label: the accumulator's name in errors.
        """
        self._change("set_quorum", f"{label}: to change the quorum", worker, lambda _: None, **change)

    def _change(self, script: str, what: str, worker: str, finish: Callable[[Reply], None], **values: Any) -> None:
        request = Request(*self._requests.sessions.begin(), worker)
        run = getattr(self._way.scripts, script)
        self._requests.execute(request, lambda: run(**request.arguments(), **values), finish, what)
