"""The process that ends the processes of a run if the process that started them is killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

__all__ = ["Guard"]

_SCRIPT = Path(__file__).with_name("guard.sh")


class Guard:
    """A running `guard.sh`.

    Args:
        grace: seconds that the processes have between SIGTERM and SIGKILL, a whole number.
        leaders: the processes that are there already, by slot. It knows them from its first moment on.

    Raises:
        OSError: it can't be started.
    """

    def __init__(self, grace: int, leaders: Mapping[int, int] = MappingProxyType({})) -> None:
        reader, self._writer = os.pipe()
        try:
            for slot, pid in leaders.items():
                self.tell(slot, pid)
            self._process = subprocess.Popen(
                ["/bin/sh", str(_SCRIPT), str(grace)],
                stdin=reader,
                # The guard outlives its owner. A reader of the owner's output must not have to wait for it as well.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            os.close(self._writer)
            raise
        finally:
            os.close(reader)

    @property
    def alive(self) -> bool:
        """Whether it is running."""
        return self._process.poll() is None

    def tell(self, slot: int, pid: int) -> None:
        """Tells the guard that a process, which leads a process group, has a slot from now on; with 0, that none has.

        A new process calls this itself, before it becomes the program that it is to run. So if the owner is killed, the
        guard knows every process: it sees the end of the file only when no new process has the pipe any more.

        If the guard is gone, nothing happens. The owner will notice, and tell another guard everything.
        """
        with contextlib.suppress(BrokenPipeError):
            # Shorter than PIPE_BUF, so it is written whole.
            os.write(self._writer, b"%d %d\n" % (slot, pid))

    def close(self) -> None:
        """Ends the guard, and whatever it still knows of. Blocks until it has ended."""
        os.close(self._writer)
        self._process.wait()
