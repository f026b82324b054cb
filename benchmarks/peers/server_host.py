"""Runs a server that listens on the address of its host, and what runs beside it, until standard input ends.

Only the hosts of the benchmark can reach that address, so the server needs no password.
"""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

from redisacc.embedded import Server


def main():
    """Starts everything, says where it is, and waits."""
    # Standard output carries the reply, so prints go elsewhere.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    settings = json.loads(Path(sys.argv[1]).read_text())
    with contextlib.ExitStack() as stack:
        place = {"socket": settings["socket"], "executable": settings["executable"]}
        server = stack.enter_context(Server(settings["data"], **place))
        with server.client() as client:
            client.config_set("protected-mode", "no")
            client.config_set("bind", settings["address"])
            client.config_set("port", settings["port"])
        pids = [server.pid]
        if settings["beside"]:
            # Words may name the socket, which only this program knows.
            command = [sys.executable, *(word.format(url=server.url) for word in settings["beside"])]
            process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.DEVNULL))
            stack.callback(process.kill)
            pids.append(process.pid)
        replies.write(
            json.dumps(
                {
                    "versions": dict([server.version.split()]),
                    "url": f"redis://{settings['address']}:{settings['port']}/0",
                    "pids": pids,
                }
            )
            + "\n"
        )
        replies.flush()
        sys.stdin.buffer.read()


main()
