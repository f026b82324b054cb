"""Servers that a test starts with settings of its own, kills, and starts again at the same port."""

import contextlib
import signal
import socket
import subprocess

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from support.until import until


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Daemon:
    """A server process, or one of Sentinel.

    Args:
        options: of the command line, "--appendonly", "yes".
        config: lines of a configuration file, which Sentinel writes to.
    """

    def __init__(self, executable, folder, *options, config=None, tls=None):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = free_port()
        self._tls = tls
        port = ["--port", str(self.port)] if tls is None else ["--port", "0", "--tls-port", str(self.port)]
        self._command = [executable]
        if config is not None:
            (folder / "daemon.conf").write_text(config)
            self._command.append(str(folder / "daemon.conf"))
        self._command += [*port, "--bind", "127.0.0.1", "--dir", str(folder), *options]
        if "--sentinel" not in options:
            self._command += ["--save", ""]
        self._process = None
        self._clients = []

    @property
    def url(self):
        return f"{'redis' if self._tls is None else 'rediss'}://127.0.0.1:{self.port}"

    @property
    def pid(self):
        assert self._process is not None
        return self._process.pid

    def start(self, *more, loaded=True, password=None):
        """Starts it, with more options, and waits until it answers; with `loaded`, until it has its data."""
        with open(self.folder / "daemon.log", "ab") as log:
            self._process = subprocess.Popen([*self._command, *more], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        process = self._process
        with contextlib.closing(self._new_client(password=password)) as client:

            def answers():
                try:
                    client.ping()
                except redis.AuthenticationError:
                    return True
                except redis.exceptions.BusyLoadingError:
                    return not loaded
                except (redis.ConnectionError, OSError):
                    assert process.poll() is None, f"it ended: {self.log()}"
                    return False
                return True

            until(answers, details=self.log)
        return self

    def log(self):
        return (self.folder / "daemon.log").read_text(errors="replace")

    def _new_client(self, **options):
        # Without retries, which would hide the fault from the test.
        options = {"retry": Retry(NoBackoff(), 0), **(self._tls or {}), **options}
        return redis.Redis(host="127.0.0.1", port=self.port, **options)

    def client(self, **options):
        """A new client, which is closed when the daemon is stopped."""
        client = self._new_client(**options)
        self._clients.append(client)
        return client

    def kill(self):
        """Kills it, as a power failure would, except that the kernel's buffers are not lost."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)

    def stall(self):
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self):
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self):
        for client in self._clients:
            client.close()
        self._clients.clear()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(10)
