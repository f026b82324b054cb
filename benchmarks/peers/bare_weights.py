"""Weights by bare sockets: SET in pieces, a token in a list of each reader, and GET."""

import common
import numpy as np
from bare import PIECE, Bare
from weights import WeightsActor


class Peer(WeightsActor):
    """A process with one bare connection to the server."""

    def __init__(self, settings):
        super().__init__(settings)
        self.bare = Bare.of_url(settings["url"])

    def versions(self):
        """Returns the versions of the packages in use."""
        return {"numpy": np.__version__}

    @staticmethod
    def pieces(array):
        """Returns key and bytes of each piece of an array."""
        data = array.reshape(-1).view(np.uint8)
        return [(b"weights:%d" % start, data[start : start + PIECE]) for start in range(0, len(data), PIECE)]

    def publish(self):
        """SETs the weights, and tells every reader."""
        commands = [self.bare.pack(b"SET", key, data.data) for key, data in self.pieces(self.weights)]
        readers = range(1, self.settings["workers"])
        commands += [self.bare.pack(b"LPUSH", b"tokens:%d" % reader, b"1") for reader in readers]
        self.bare.send_all([buffer for command in commands for buffer in command])
        self.bare.lines(len(commands))

    def read(self):
        """Waits for the token, and GETs the weights."""
        self.bare.pop(b"tokens:%d" % self.settings["number"])
        found = np.empty_like(self.weights)
        pieces = self.pieces(found)
        self.bare.send_all([buffer for key, _ in pieces for buffer in self.bare.pack(b"GET", key)])
        for _, data in pieces:
            self.bare.bulk_into(data)
        return found


common.serve(Peer)
