"""What the chaos runs on: a server, or a cluster, that may be killed at any moment and loses nothing."""

import contextlib
import os
import signal
import subprocess
import time

import redis
from support.proxy import Proxy

from redisacc import embedded

# How long the server may stand still, in seconds. Nothing happens meanwhile, so long pauses are rare.
PAUSES = [0.01, 0.05, 0.1, 0.2, 0.4, 2.0]


class Server:
    """A server that loses nothing when it is killed, because it replies only after writing its append-only file."""

    min_replicas = 0

    def __init__(self, directory, seed=None):
        """Initializes the server. ``seed``: of the proxy; None: there is none."""
        self._directory = directory
        self.socket = str(directory / "s")
        self.url = f"unix://{self.socket}"
        self._process = None
        self._proxy = None if seed is None else Proxy(self.socket, seed)

    def start(self):
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

    def stop(self):
        if self._proxy is not None:
            self._proxy.close()
        self.kill()

    def client(self):
        return redis.Redis(unix_socket_path=self.socket)

    def proxied(self):
        return {"url": self._proxy.url}

    def proxies(self):
        return [] if self._proxy is None else [self._proxy]

    def weather(self, weather):
        for proxy in self.proxies():
            proxy.weather(weather)

    def kill(self):
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def calm_down(self):
        pass

    # Deeds

    def deeds(self):
        return [
            *[self._flush, self._disconnect, self._disconnect_listeners] * 2,
            # Nothing happens until the server is back.
            self._kill,
            self._pause,
            self._pause_clients,
        ]

    def _flush(self, _):
        with self.client() as client:
            client.script_flush()
        return "SCRIPT FLUSH"

    def _disconnect(self, _):
        with self.client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        return "CLIENT KILL TYPE normal"

    def _disconnect_listeners(self, _):
        with self.client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        return "CLIENT KILL TYPE pubsub"

    def _pause_clients(self, chance):
        what, seconds = chance.choice(["ALL", "WRITE"]), chance.choice(PAUSES)
        with self.client() as client:
            client.execute_command("CLIENT", "PAUSE", round(1000 * seconds), what)
        return f"CLIENT PAUSE {what}"

    def _kill(self, chance):
        self.kill()
        time.sleep(chance.uniform(0.0, 0.5))
        self.start()
        return "kills of the server"

    def _pause(self, chance):
        self._process.send_signal(signal.SIGSTOP)
        time.sleep(chance.choice(PAUSES))
        self._process.send_signal(signal.SIGCONT)
        return "pauses of the server"
