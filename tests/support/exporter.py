"""The command `serve` in a process of its own."""

import os
import re
import signal
import urllib.request

from support.warm_python import WarmPython


class Exporter:
    """The command `serve` in a process of its own, at a free port if no option names one.

    Attributes:
        line: what it says when it serves.
        url: where the page is, with a slash at the end.
        port: its port.
    """

    def __init__(self, url, *words, token=""):
        command = ["-m", "redisacc", "serve", "--port", "0", "--redis", url, *words]
        self.process = WarmPython(command, text=True, env={**os.environ, "REDISACC_SERVE_TOKEN": token})
        self.line = self.process.stdout.readline()
        found = re.search(r"page at (http://\S+:(\d+)/) ", self.line)
        assert found is not None, self.process.communicate(timeout=10)
        self.url, self.port = found[1], int(found[2])

    def scrape(self):
        """Returns the lines of the metrics."""
        with urllib.request.urlopen(f"{self.url}metrics", timeout=20) as reply:
            return reply.read().decode().splitlines()

    def stop(self):
        """Ends it as Ctrl-C does, and returns what it has written to stderr."""
        self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate(timeout=20)
        assert (self.process.returncode, out) == (130, "")
        return str(err)
