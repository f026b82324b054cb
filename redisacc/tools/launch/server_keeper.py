"""Keeps a server of a run going."""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Callable

from redisacc._clock import clock
from redisacc._text import printable_lines
from redisacc.embedded import Server
from redisacc.embedded.guarded_process import status_text
from redisacc.errors import ServerError
from redisacc.tools.launch.restarts import Restarts
from redisacc.tools.launch.run import Look

# The last line that a server logs when it starts.
_READY = "Ready to accept connections"
_LOG_LINES = 1000


@dataclasses.dataclass(eq=False)
class ServerKeeper:
    """Starts the server of a run again if it was killed or has crashed, at the same address.

    A start that fails counts as one more death: whatever it failed by may be over at the next attempt.

    Attributes:
        server: the server.
        restarts: how often it is started again within a time.
        keeps_data: whether it has a directory of its own, so that it starts with what it had written.
        name: what messages call it.
        start: starts it again. None means its own `start`.
    """

    server: Server
    restarts: Restarts
    _: dataclasses.KW_ONLY
    keeps_data: bool
    name: str = "the server"
    start: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self._started_at = clock.now()
        # While it starts: a thread, because it may load a large file, and the run goes on.
        self._starting: threading.Thread | None = None
        self._error: ServerError | None = None

    def look(self) -> Look | None:
        """Looks after the server. Returns what there is to say, None if nothing has changed. Never blocks."""
        server, was_starting = self.server, self._starting is not None
        if self._starting is not None and self._starting.is_alive():
            return None
        self._starting = None
        error, self._error = self._error, None
        if error is not None:
            return self._try_again(f"{self.name} could not be restarted: {error}")
        if server.running:
            return Look(f"{self.name} has restarted as process {server.pid}") if was_starting else None
        text = how_it_ended(server, self.name)
        if server.exit_status == 0:
            # Somebody who shuts a server down does not want it back.
            return Look(text, 1)
        kept = "" if self.keeps_data else ". Its data was in memory only; runs continue with what processes have"
        return self._try_again(text, kept)

    def _try_again(self, text: str, more: str = "") -> Look:
        now = clock.now()
        pause = self.restarts.pause_after(now - self._started_at, now)
        if pause is None:
            return Look(text, 1)
        self._starting = threading.Thread(target=self._start, args=(pause,), daemon=True)
        self._starting.start()
        return Look(f"{text}. It restarts{f' in {pause:g} s' if pause else ''}{more}")

    def _start(self, pause: float) -> None:
        clock.sleep(pause)
        try:
            (self.start or self.server.start)()
        except ServerError as error:
            self._error = error
        self._started_at = clock.now()


def how_it_ended(server: Server, name: str = "the server") -> str:
    """Returns a message about a server that has ended by itself: how, and what it has logged since it was ready.

    What it logged before, such as advice about the settings of the kernel, is not why it ended.
    """
    status = server.exit_status
    text = f"{name} ended unexpectedly" if status is None else f"{name} {status_text(status)}"
    if status == -signal.SIGKILL:
        text += ", by somebody or by the kernel for lack of memory, which `dmesg` reports"
    log = server.log_tail(_LOG_LINES).split("\n")
    ready = max((number for number, line in enumerate(log) if _READY in line), default=-1)
    tail = "\n".join(log[ready + 1 :][-10:])
    if not tail:
        return f"{text}. It has logged nothing since it was ready"
    return f"{text}; the end of its log: {printable_lines(tail)}"
