"""A round by bare sockets: the same transfers and additions, without steps, checks or guarantees.

It measures the work that no client of a Redis server can avoid. Workers SET their arrays in pieces and announce
them in a list. The taker waits on that list, GETs the arrays, and adds them with the library's own addition in numpy.
"""

import socket

import common
import numpy as np
from bare import PIECE, Bare

from redisacc._arrays import dtypes
from redisacc._arrays import sums as _totals
from redisacc._arrays.gradient import Section


def pieces(size):
    """Returns start and length of each piece of an array of ``size`` bytes."""
    return [(start, min(PIECE, size - start)) for start in range(0, size, PIECE)]


class Peer(common.Actor):
    """A process with one bare connection to the server."""

    def __init__(self, settings):
        super().__init__(settings)
        self.bare = Bare.of_url(settings["url"])

    def versions(self):
        """Returns the versions of the packages in use."""
        return {"numpy": np.__version__}

    def ready(self, job):
        """Prepares a job; this is not timed."""
        super().ready(job)
        for worker in range(job["workers"]):
            self.gradient(job["workload"], worker, job["variant"])

    def bulk(self, place):
        """Receives a string of exactly the length of ``place`` into it."""
        expected, end = b"$%d\r\n" % len(place), bytearray(2)
        head = bytearray(len(expected))
        received = self.bare.socket.recvmsg_into([head, place, end], 0, socket.MSG_WAITALL)[0]
        if received != len(expected) + len(place) + 2 or head != expected:
            raise common.WrongResult(f"{self.job}: expected {expected!r}, got {bytes(head)!r}")


class Worker(Peer):
    """Sends one gradient in each round."""

    def go(self):
        """Sends the gradient and announces it."""
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
    """Adds up the gradients of a round."""

    def go(self):
        """Receives and adds the announced gradients, and returns their mean."""
        workload = self.workloads[self.job["workload"]]
        if workload["kind"] == "dense":
            total = _totals.DenseSum(dtypes.TABLE["float32"], tuple(workload["shape"]))
        else:
            rows, width = workload["shape"]
            total = _totals.SparseSum(dtypes.TABLE["float32"], (width,), bound=rows, where="bare")
        passage = np.empty(PIECE, np.uint8)
        for arrived in range(self.job["num_required"]):
            number = int(self.bare.pop(b"come"))
            indices, values = self.gradient(self.job["workload"], number, self.job["variant"])
            commands = [self.bare.pack(b"GET", b"values:%d:%d" % (number, start)) for start, _ in pieces(values.nbytes)]
            if indices is not None:
                commands.insert(0, self.bare.pack(b"GET", b"indices:%d" % number))
            self.bare.send_all([buffer for command in commands for buffer in command])
            self._add(total, indices, values, passage if arrived else None)
        found = total.result("MEAN", self.job["num_required"])
        return (None, found) if workload["kind"] == "dense" else found

    def _add(self, total, indices, values, passage):
        """Receives a gradient with the sizes of these arrays, and adds it. The passage is None for the first one."""
        if indices is None and passage is not None:
            for start, length in pieces(values.nbytes):
                self.bulk(passage[:length].data)
                total.add_piece(start // values.itemsize, passage[:length].view(values.dtype), begins=False)
            return
        if indices is not None:
            indices = np.empty_like(indices)
            self.bulk(indices.view(np.uint8).data)
        values = np.empty_like(values)
        data = values.reshape(-1).view(np.uint8).data
        for start, length in pieces(len(data)):
            self.bulk(data[start : start + length])
        total.add(Section(values, indices, ours=True))


common.serve(lambda settings: (Worker if settings["role"] == "worker" else Taker)(settings))
