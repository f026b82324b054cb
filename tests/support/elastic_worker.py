"""A program that forks a worker of a training for each line it reads: the URL of the server, and a number.

The answer is the process id. A worker applies ones until the training is finished.
"""

import json
import os
import signal
import sys
import traceback

import numpy as np

import redisacc

NAME = "elastic"


def work(url, number):
    with redisacc.Worker(NAME, number=number, redis=url) as worker:
        for _ in worker.steps():
            worker.apply({"w": np.ones(2, np.int64)})


def main():
    # The parent never waits for its children.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                work(*json.loads(line))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
