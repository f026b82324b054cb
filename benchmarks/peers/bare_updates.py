"""Steps by bare sockets whose update is where the sum is: a server and an updater on each worker's host.

It measures the work that no client of such servers can avoid: the same bytes on the same ways and the same arithmetic,
without steps, checks or guarantees. Each server has an equal share of all elements. Workers SET their pieces of each
share, and announce them in a list. An updater pops announcements, GETs pieces, and adds them; with a piece of every
worker, it updates that piece of the weights, SETs it, and announces it in a list of each worker, which GETs it.
"""

import threading
import traceback

import common
import numpy as np
from bare import Bare, PieceSums
from steps import FlatActor

# Elements of a piece.
PIECE = 64 * 2**10


def shares(elements, number):
    """Returns the start and the end of each server's share of the elements."""
    return [(elements * one // number, elements * (one + 1) // number) for one in range(number)]


def pieces(start, end):
    """Returns the start and the end of each piece of a share."""
    return [(first, min(first + PIECE, end)) for first in range(start, end, PIECE)]


class Worker(FlatActor):
    """Sends gradients and gets weights, with two threads and two connections for each server."""

    def __init__(self, settings):
        super().__init__(settings)
        self.number = settings["number"]
        self.gradients = [self.packed(self.gradient(variant)) for variant in range(2)]
        nodes = settings["nodes"]
        found = list(zip(shares(len(self.own), len(nodes)), nodes, strict=True))
        # Each worker begins with another server, so that their links are used evenly.
        turned = found[self.number % len(found) :] + found[: self.number % len(found)]
        self.calls = [(call, Bare(*node), pieces(*share)) for share, node in turned for call in (self.put, self.fetch)]

    def put(self, node, cut):
        """Sends the pieces of a share."""
        gradient, commands = self.gradients[self.step % 2], []
        for start, end in cut:
            key = b"piece:%d:%d" % (self.number, start)
            commands += node.pack(b"SET", key, gradient[start:end].view(np.uint8).data)
            commands += node.pack(b"LPUSH", b"pieces", b"%d %d %d" % (self.number, start, end))
        node.send_all(commands)
        node.lines(2 * len(cut))

    def fetch(self, node, cut):
        """Gets the pieces of a share of the next weights, in the order in which they become ready."""
        waiting = node.pack(b"BRPOP", b"ready:%d" % self.number, b"0")
        node.send_all(waiting)
        for left in reversed(range(len(cut))):
            start, end = map(int, node.popped().split())
            node.send_all([*node.pack(b"GET", b"weights:%d" % start), *(waiting if left else ())])
            node.bulk_into(self.own[start:end])

    def go(self):
        """Does a worker's part of each step."""
        for _ in range(self.job["repeat"]):
            threads = [threading.Thread(target=call, args=(node, cut)) for call, node, cut in self.calls]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.step += 1


class Updater(FlatActor):
    """Adds up the pieces of one share, and updates them; it gets no jobs."""

    def __init__(self, settings):
        super().__init__(settings)
        self.node = Bare(*settings["nodes"][settings["number"]])
        threading.Thread(target=self.update, daemon=True).start()

    def update(self):
        """Adds and updates pieces until the process ends."""
        workers = self.settings["workers"]
        sums, factor = PieceSums(self.node, workers, PIECE), np.float32(self.rate / workers)
        try:
            while True:
                number, start, end = map(int, self.node.pop(b"pieces").split())
                total = sums.add(number, start, end - start)
                if total is None:
                    continue
                total *= factor
                self.own[start:end] -= total
                commands = self.node.pack(b"SET", b"weights:%d" % start, self.own[start:end].view(np.uint8).data)
                for worker in range(workers):
                    commands += self.node.pack(b"LPUSH", b"ready:%d" % worker, b"%d %d" % (start, end))
                self.node.send_all(commands)
                self.node.lines(workers + 1)
        except Exception:
            traceback.print_exc()
            raise


common.serve(lambda settings: (Updater if settings["role"] == "updater" else Worker)(settings))
