"""Runs a node of a cluster and its reducer on one host, until standard input ends.

Only the hosts of the benchmark can reach its address, so the node needs no password. Node 0 introduces the others.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import redis

SLOTS = 16_384
TIMEOUT = 60


def await_true(condition):
    """Asks until a condition is true. A node that does not answer yet counts as false."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        with contextlib.suppress(redis.RedisError):
            if condition():
                return
        if time.monotonic() > deadline:
            raise TimeoutError("the nodes did not become a cluster")
        time.sleep(0.05)


def has_epoch(node):
    """Returns whether a node has its own epoch."""
    return node.execute_command("CLUSTER INFO")["cluster_my_epoch"] != "0"


def join(own, number, nodes):
    """Makes this node a part of the cluster, with an equal share of the slots."""
    await_true(own.ping)
    first, end = SLOTS * number // len(nodes), SLOTS * (number + 1) // len(nodes)
    own.execute_command("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
    own.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
    if number == 0:
        for address, port in nodes[1:]:
            # A node that knows another one can no longer be given an epoch.
            await_true(partial(has_epoch, redis.Redis(address, port)))
            own.execute_command("CLUSTER", "MEET", address, port)

    def is_complete():
        info = own.execute_command("CLUSTER INFO")
        return info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == len(nodes)

    await_true(is_complete)


def end_with_parent():
    """Ends this process when its parent does."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def main():
    """Starts everything, says where it is, and waits."""
    # Standard output carries the reply, so prints go elsewhere.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    settings = json.loads(Path(sys.argv[1]).read_text())
    number, nodes = settings["number"], settings["nodes"]
    address, port = nodes[number]
    options = ["--bind", address, "--port", f"{port}", "--protected-mode", "no", "--save", "", "--appendonly", "no"]
    options += ["--cluster-enabled", "yes", "--dir", settings["directory"], "--logfile", "node.log"]
    server = subprocess.Popen([settings["executable"], *options], stdin=subprocess.DEVNULL, preexec_fn=end_with_parent)  # noqa: PLW1509
    own = redis.Redis(address, port)
    join(own, number, nodes)
    reducer = [sys.executable, "-m", "redisacc", "reduce", "--redis", f"redis+cluster://{address}:{port}"]
    reducer += ["--node", f"{address}:{port}"]
    process = subprocess.Popen(reducer, stdin=subprocess.DEVNULL, preexec_fn=end_with_parent)  # noqa: PLW1509
    version = own.info("server")
    name = "valkey" if "valkey_version" in version else "redis"
    message = {"versions": {name: version[f"{name}_version"]}, "pids": [server.pid, process.pid]}
    replies.write(json.dumps(message) + "\n")
    replies.flush()
    sys.stdin.buffer.read()


main()
