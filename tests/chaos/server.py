"""The server of the chaos: a real one, which may be killed at any moment and loses nothing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

import redis

from redisacc import embedded


class Server:
    """A server that loses nothing when it is killed, because it replies only after writing its append-only file."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.socket = str(directory / "s")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The address of its socket, past the proxy."""
        return f"unix://{self.socket}"

    def start(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.socket)
        command = [str(embedded.find_server()), "--port", "0", "--unixsocket", self.socket, "--save", ""]
        command += ["--dir", str(self._directory), "--appendonly", "yes", "--appendfsync", "always"]
        # A short file is loaded soon, and rewriting it is one more thing that a kill may interrupt.
        command += ["--auto-aof-rewrite-min-size", "4mb"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.RedisError:
                assert time.monotonic() < deadline, "the server doesn't start"
                time.sleep(0.02)

    def client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=self.socket)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
