"""A round by bare sockets: the same bytes through a server, and the same additions. No step, no check, no promise.

What is left is what no client of a Redis server can do without. Workers SET their arrays in pieces and say in a list
that they are there; the taker waits on that list, GETs them, and adds with the library's own addition in numpy.
"""

import socket
from urllib.parse import urlsplit

import common
import numpy as np
from bare import Bare

from redisacc import _dtypes, _totals
from redisacc._parked import Gradient

# As redisacc cuts them.
PIECE = 2 * 2**20 - 64


def pieces(size):
    """Where each piece of so many bytes begins and how long it is."""
    return [(start, min(PIECE, size - start)) for start in range(0, size, PIECE)]


class Peer(common.Actor):
    def __init__(self, settings):
        super().__init__(settings)
        url = urlsplit(settings["url"])
        self.bare = Bare(url.hostname, url.port)

    def versions(self):
        return {"numpy": np.__version__}

    def ready(self, job):
        super().ready(job)
        for worker in range(job["workers"]):
            self.gradient(job["workload"], worker, job["variant"])

    def bulk(self, place):
        """A string of exactly this length, into ``place``."""
        expected, end = b"$%d\r\n" % len(place), bytearray(2)
        head = bytearray(len(expected))
        received = self.bare.socket.recvmsg_into([head, place, end], 0, socket.MSG_WAITALL)[0]
        if received != len(expected) + len(place) + 2 or head != expected:
            raise common.WrongResult(f"{self.job}: {bytes(head)!r} where {expected!r} should have come")


class Worker(Peer):
    def go(self):
        number = self.settings["number"]
        indices, values = self.gradient(self.job["workload"], number, self.job["variant"])
        data = values.reshape(-1).view(np.uint8).data
        commands = [
            self.bare.pack(b"SET", b"values:%d:%d" % (number, start), data[start : start + length])
            for start, length in pieces(len(data))
        ]
        if indices is not None:
            commands.append(self.bare.pack(b"SET", b"indices:%d" % number, indices.view(np.uint8).data))
        commands.append(self.bare.pack(b"LPUSH", b"come", b"%d" % number))
        self.bare.send_all([buffer for command in commands for buffer in command])
        self.bare.lines(len(commands))


class Taker(Peer):
    def go(self):
        workload = self.workloads[self.job["workload"]]
        if workload["kind"] == "dense":
            total = _totals.DenseTotal(_dtypes.TABLE["float32"], tuple(workload["shape"]), chunk=1, where="bare")
        else:
            rows, width = workload["shape"]
            total = _totals.SparseTotal(_dtypes.TABLE["float32"], (width,), bound=rows, where="bare")
        passage = np.empty(PIECE, np.uint8)
        for _ in range(self.job["num_required"]):
            self.bare.send(b"BRPOP", b"come", b"0")
            number = int(self.bare.lines(5).split(b"\r\n")[4])
            indices, values = self.gradient(self.job["workload"], number, self.job["variant"])
            commands = [self.bare.pack(b"GET", b"values:%d:%d" % (number, start)) for start, _ in pieces(values.nbytes)]
            if indices is not None:
                commands.insert(0, self.bare.pack(b"GET", b"indices:%d" % number))
            self.bare.send_all([buffer for command in commands for buffer in command])
            self._add(total, indices, values, passage)
        found = total.result("MEAN", self.job["num_required"])
        return (None, found) if workload["kind"] == "dense" else found

    def _add(self, total, indices, values, passage):
        """What comes has the sizes of these arrays."""
        if indices is None and total.number:
            for start, length in pieces(values.nbytes):
                self.bulk(passage[:length].data)
                total.add_piece(start // values.itemsize, passage[:length].view(values.dtype))
            total.number += 1
            return
        if indices is not None:
            indices = np.empty_like(indices)
            self.bulk(indices.view(np.uint8).data)
        values = np.empty_like(values)
        data = values.reshape(-1).view(np.uint8).data
        for start, length in pieces(len(data)):
            self.bulk(data[start : start + length])
        total.add(Gradient(values, indices, ours=True))


common.serve(lambda settings: (Worker if settings["role"] == "worker" else Taker)(settings))
