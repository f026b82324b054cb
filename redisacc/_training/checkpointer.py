"""Writes checkpoints while a run continues, in a thread that reads what is published from the server.

The thread reads from the server instead of the chief's memory, because the program may write to its arrays after the
next ``publish``, so that they would have to be copied in each step with a checkpoint; and because a chief need not have
any arrays. It uses a connection of its own. If a later version is published before it has read the one that was due, it
writes the later one.

Whatever fails is a warning, and the thread tries again when the next checkpoint is due. If the last try has failed when
the chief closes, it tries once more, because time may have passed and no other checkpoint will follow; but not if the
server failed, because then closing would wait for it a second time.
"""

from __future__ import annotations

import datetime
import logging
import math
import os
import threading
from typing import Any

from redisacc._arrays import validation
from redisacc._checkpoints.address import place_of
from redisacc._checkpoints.file import Checkpoint
from redisacc._checkpoints.folder import Folder
from redisacc._clock import clock, durations
from redisacc._format.keys import SNAPSHOT, ParameterKeys
from redisacc._format.parameter_record import TRAINING
from redisacc._log import inform
from redisacc._protocol.parameters.reader import ParameterReader
from redisacc._protocol.updates.record import read_update_record
from redisacc._text import shown
from redisacc._training.options import Checkpoints
from redisacc._training.program_weights import unpacked
from redisacc._wire.transport import Transport
from redisacc.errors import InvalidArgumentError, RedisAccError

logger = logging.getLogger("redisacc")


def read_published(transport: Transport, name: str) -> Checkpoint | None:
    """Returns what is published under a name, with the exact parameters of float32; None if nothing is.

    If that is mean gradients, it is the last snapshot.

    Raises:
        RedisAccError: any error of ``Parameters.latest``.
    """
    updated = read_update_record(transport, ParameterKeys(name))
    if updated is not None and updated.model.is_mean:
        found = ParameterReader(transport, ParameterKeys(name + SNAPSHOT)).latest(state=True)
        is_its = found is not None and training_of(found[2]) in ("", updated.record.incarnation)
        return Checkpoint(name, found[0].step, *found[1:], found[0].kept) if found is not None and is_its else None
    found = ParameterReader(transport, ParameterKeys(name)).latest(state=True)
    if found is None:
        return None
    record, tree, published = found
    return Checkpoint(name, record.step, *unpacked(tree, published, name), record.kept)


def training_of(state: Any) -> str | None:
    """Returns the incarnation of the run that a snapshot is of, given the state in it; None if it is none."""
    marker = state.get(TRAINING) if isinstance(state, dict) else None
    return None if marker is None else marker.tobytes().decode(errors="replace")


def folder_of(wanted: Checkpoints, name: str) -> Folder:
    """Returns the folder of a run's checkpoints, which is created, claimed, and tried.

    Raises:
        InvalidArgumentError: an argument is invalid, or the folder belongs to another run.
        OSError: the folder cannot be created, read or written to.
    """
    folder, firsts = wanted.folder, wanted.keep_every
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise InvalidArgumentError(f"checkpoint must be the path of a folder or an address, not {shown(folder)}")
    kept = validation.integer(wanted.keep, "checkpoint.keep", low=1)
    if firsts is not None:
        firsts = validation.integer(firsts, "checkpoint.keep_every", low=1)
    found = Folder(place_of(folder), name, keep=kept, keep_every=firsts)
    found.try_out()
    return found


class Checkpointer:
    """Writes the checkpoints of a chief.

    Args:
        transport: the way to the server.
        name: the name of the run.
        wanted: where, how often, and which of them stay.

    Attributes:
        folder: where they are.

    Raises:
        InvalidArgumentError: an argument is invalid, or the folder belongs to another run.
        OSError: the folder cannot be created, read or written to.
    """

    def __init__(self, transport: Transport, name: str, wanted: Checkpoints) -> None:
        self._steps, self._seconds = _interval(wanted.every)
        self.folder = folder_of(wanted, name)
        self._transport = transport
        self._name = name
        # What follows is guarded by the condition.
        self._changed = threading.Condition()
        self._is_due = self._is_closed = False
        # Whether to try again at the end. Only the thread uses it.
        self._has_failed = False
        self._thread: threading.Thread | None = None
        # The step after which the last checkpoint was due, and when.
        self._last_step: int | None = None
        self._last_time = clock.now()
        self._written: int | None = None

    def note(self, step: int, *, last: bool = False) -> None:
        """Notes that a step was published. Never waits: if a checkpoint is due, the thread writes it.

        Args:
            step: the step.
            last: whether it is the last one of the run, which always gets a checkpoint.
        """
        now = clock.now()
        before = self._last_step
        if before is None:
            # The loop began at the step before this one.
            before = self._last_step = step - 1
        if not last:
            by_steps = self._steps is not None and step // self._steps > before // self._steps
            by_time = now - self._last_time >= self._seconds
            if not (by_steps or by_time):
                return
        self._last_step, self._last_time = step, now
        with self._changed:
            self._is_due = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="redisacc-checkpoints", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Waits for a checkpoint that is due or being written. Closing twice does nothing."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._transport.waits.call(lambda: thread.join(durations.closing))
            if thread.is_alive():
                self._warn(
                    f"a checkpoint is still being written to {self.folder.path} after {durations.closing:.0f} s; if "
                    "this process ends now, it is lost"
                )

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._is_due or self._is_closed):
                    self._changed.wait()
                if not (self._is_due or self._has_failed):
                    return
                self._is_due, is_last = False, self._is_closed
            try:
                self._write()
                self._has_failed = False
            except Exception as error:  # noqa: BLE001 - without this thread, there would be no further checkpoint
                self._has_failed = not isinstance(error, RedisAccError)
                self._report(error, is_last=is_last)
            if is_last:
                return

    def _report(self, error: Exception, *, is_last: bool) -> None:
        is_expected = isinstance(error, RedisAccError | OSError)
        cause = error if is_expected else f"{type(error).__name__}: {error}"
        if is_last:
            advice = f"this was the last try; `redisacc checkpoint {self._name} FILE` writes what is published"
        else:
            advice = "trying again when the next one is due" + (", or at the end" if self._has_failed else "")
        text = f"no checkpoint was written to {self.folder.path}: {cause}; {advice}"
        self._warn(text, has_traceback=not is_expected)

    def _warn(self, text: str, *, has_traceback: bool = False) -> None:
        logger.warning("%s: %s", self._name, text, exc_info=has_traceback, extra={"accumulator": self._name})

    def _write(self) -> None:
        found = read_published(self._transport.blocking, self._name)
        if found is None or found.step == self._written:
            return
        path = self.folder.write(found)
        self._written = found.step
        inform(self._name, "wrote the checkpoint %s", path, step=found.step)


def _interval(every: object) -> tuple[int | None, float]:
    """Returns after how many steps a checkpoint is due, and after how many seconds."""
    if isinstance(every, datetime.timedelta):
        seconds = every.total_seconds()
        if seconds <= 0:
            raise InvalidArgumentError(f"checkpoint.every must be a positive time, not {shown(every)}")
        return None, seconds
    try:
        return validation.integer(every, "checkpoint.every", low=1), math.inf
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{error}; or a datetime.timedelta") from None
