"""The command `serve` in a process of its own."""

import re
import signal
import urllib.request

from support.warm_python import WarmPython


class Exporter:
    """The command `serve` in a process of its own, at a free port."""

    def __init__(self, url, *words):
        command = ["-m", "redisacc", "serve", "--port", "0", "--redis", url, *words]
        self.process = WarmPython(command, text=True)
        assert self.process.stdout is not None
        found = re.search(r"metrics at (http://127\.0\.0\.1:\d+/metrics);", self.process.stdout.readline())
        assert found is not None
        self._address = found[1]

    def scrape(self):
        """Returns the lines of the metrics."""
        with urllib.request.urlopen(self._address, timeout=20) as reply:
            return reply.read().decode().splitlines()

    def stop(self):
        """Ends it as Ctrl-C does, and returns what it has written to stderr."""
        self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate(timeout=20)
        assert (self.process.returncode, out) == (130, "")
        return str(err)
