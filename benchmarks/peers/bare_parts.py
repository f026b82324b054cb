"""A round by bare sockets with a reducer: what addition beside the server can reach, without checks or guarantees.

Workers SET a dense gradient in pieces and announce each of them. The reducer, a process beside the server, GETs every
piece as it comes and adds it to its sum. When a piece of all workers is in the sum, it pushes that piece of the sum to
a list. The taker pops the pieces of the sum, while the workers are still sending others. It asks for all of them at
once, because every request waits behind the bytes of workers at the server's port.
"""

import sys
import threading
import traceback

import common
import numpy as np
from bare import Bare, PieceSums

# Half a MiB and an eighth of it did equally well in a prototype.
PIECE = 512 * 2**10


class Peer(common.Actor):
    """A process with one bare connection to the server."""

    def __init__(self, settings):
        super().__init__(settings)
        self.bare = Bare.of_url(settings["url"])
        self.replies = self.bare.socket.makefile("rb")

    def versions(self):
        """Returns the versions of the packages in use."""
        return {"numpy": np.__version__}


class Worker(Peer):
    """Sends one gradient in each round."""

    def go(self):
        """Sends the gradient, and announces each piece."""
        number = self.settings["number"]
        _, values = self.gradient(self.job["workload"], number, self.job["variant"])
        data = values.reshape(-1).view(np.uint8).data
        commands = []
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            commands.append(self.bare.pack(b"SET", b"piece:%d:%d" % (number, start), piece))
            commands.append(self.bare.pack(b"LPUSH", b"pieces", b"%d %d %d" % (number, start, len(piece))))
        self.bare.send_all([buffer for command in commands for buffer in command])
        self.bare.lines(len(commands))


class Reducer(Peer):
    """Adds up the pieces of all rounds; it gets no jobs."""

    def __init__(self, settings):
        super().__init__(settings)
        threading.Thread(target=self.reduce, daemon=True).start()

    def reduce(self):
        """Adds pieces until the process ends."""
        sums = PieceSums(self.bare, self.settings["workers"], PIECE // 4)
        try:
            while True:
                number, start, length = map(int, self.bare.pop(b"pieces").split())
                total = sums.add(number, start, length // 4)
                if total is not None:
                    self.bare.send(b"LPUSH", b"sums", np.int64(start).tobytes() + total.tobytes())
                    self.bare.lines()
        except Exception:
            traceback.print_exc()
            raise


class Taker(Peer):
    """Fetches the sums of a round."""

    def go(self):
        """Receives the pieces of the sum, and returns the mean."""
        found = np.empty(self.workloads[self.job["workload"]]["shape"], np.float32)
        data = found.reshape(-1).view(np.uint8).data
        starts = range(0, len(data), PIECE)
        self.bare.send_all(self.bare.pack(b"BRPOP", b"sums", b"0") * len(starts))
        for _ in starts:
            # *2, $4, sums, and the length of the piece with its start.
            length = int([self.replies.readline() for _ in range(4)][-1][1:]) - 8
            start = int.from_bytes(self.replies.read(8), sys.byteorder)
            if self.replies.readinto(data[start : start + length]) != length or self.replies.readline() != b"\r\n":
                raise common.WrongResult(f"{self.job}: the piece of the sum from {start} on has not {length} bytes")
        found /= self.job["num_required"]
        return None, found


ACTORS = {"worker": Worker, "taker": Taker, "reducer": Reducer}
common.serve(lambda settings: ACTORS[settings["role"]](settings))
