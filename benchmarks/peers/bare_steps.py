"""Steps by bare sockets: the same bytes on the same ways and the same arithmetic, without checks or guarantees.

It measures the work that no client of a Redis server can avoid. Workers SET a gradient in pieces and announce it in a
list. The chief waits on that list, GETs the gradients, adds them, updates the weights, SETs them, and pushes a token
for each worker, which GETs the weights. All arrays that are sent lie in one piece of memory, so nothing is copied to
pack them. Of the tables, the same number of rows is sent; as nobody adds them up, they are not checked.
"""

import common
import numpy as np
from bare import PIECE, Bare
from steps import FlatActor


class Peer(FlatActor):
    """A process with one bare connection to the server."""

    def __init__(self, settings):
        super().__init__(settings)
        self.bare = Bare.of_url(settings["url"])

    @staticmethod
    def pieces(name, array):
        """Returns the name and the bytes of each piece of an array."""
        data = array.reshape(-1).view(np.uint8)
        return [(b"%s:%d" % (name, start), data[start : start + PIECE]) for start in range(0, len(data), PIECE)]

    def put(self, arrays, *more):
        """SETs arrays by name, and sends more commands with them."""
        commands = [
            self.bare.pack(b"SET", key, data.data)
            for name, array in arrays.items()
            for key, data in self.pieces(name, array)
        ]
        commands += [self.bare.pack(*command) for command in more]
        self.bare.send_all([buffer for command in commands for buffer in command])
        self.bare.lines(len(commands))

    def get(self, arrays):
        """GETs arrays by name, each into its memory."""
        pieces = [piece for name, array in arrays.items() for piece in self.pieces(name, array)]
        self.bare.send_all([buffer for key, _ in pieces for buffer in self.bare.pack(b"GET", key)])
        for _, data in pieces:
            self.bare.bulk_into(data)


class Worker(Peer):
    """Sends gradients and gets weights."""

    def __init__(self, settings):
        super().__init__(settings)
        self.number = settings["number"]
        self.gradients = []
        for variant in range(2):
            arrays = self.gradient(variant)
            rows = [np.concatenate([part.reshape(-1).view(np.uint8) for part in arrays[name]]) for name in self.sparse]
            self.gradients.append({b"dense:%d" % self.number: self.packed(arrays)})
            if rows:
                self.gradients[-1][b"rows:%d" % self.number] = np.concatenate(rows)
        # As many rows as change in a step, with their indices.
        means = self.load("mean-0")
        changed = sum(
            int(means[leaf["name"]].any(axis=1).sum()) * (4 * leaf["shape"][1] + 8)
            for leaf in self.leaves
            if leaf["rows"]
        )
        self.wanted = {b"weights": self.own}
        if changed:
            self.wanted[b"changed"] = np.empty(changed, np.uint8)

    def go(self):
        """Does a worker's part of each step."""
        for _ in range(self.job["repeat"]):
            self.put(self.gradients[self.step % 2], (b"LPUSH", b"come", b"%d" % self.number))
            self.bare.pop(b"tokens:%d" % self.number)
            self.get(self.wanted)
            self.step += 1


class Chief(Peer):
    """Adds up gradients and sends weights."""

    def __init__(self, settings):
        super().__init__(settings)
        self.total, self.passage = np.empty_like(self.own), np.empty_like(self.own)
        self.changed, self.rows = {}, 0
        for leaf in self.leaves:
            if leaf["rows"]:
                changed = int(self.load("mean-0")[leaf["name"]].any(axis=1).sum())
                self.changed[b"changed"] = changed * (4 * leaf["shape"][1] + 8) + self.changed.get(b"changed", 0)
                self.rows += leaf["rows"] * (4 * leaf["shape"][1] + 8)
        self.changed = {name: np.zeros(size, np.uint8) for name, size in self.changed.items()}
        self.row_bytes = np.empty(self.rows, np.uint8)

    def go(self):
        """Does the chief's part of each step."""
        workers = self.settings["workers"]
        tokens = [(b"LPUSH", b"tokens:%d" % worker, b"1") for worker in range(workers)]
        for _ in range(self.job["repeat"]):
            for arrived in range(workers):
                number = self.bare.pop(b"come")
                place = self.passage if arrived else self.total
                self.get({b"dense:" + number: place} | ({b"rows:" + number: self.row_bytes} if self.rows else {}))
                if arrived:
                    self.total += place
            self.total *= np.float32(self.rate / workers)
            self.own -= self.total
            self.put({b"weights": self.own} | self.changed, *tokens)
            self.step += 1


common.serve(lambda settings: (Worker if settings["role"] == "worker" else Chief)(settings))
