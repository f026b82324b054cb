"""Accumulates in Redis as people write it by hand with redis-py.

``hincrbyfloat``: every element is a field of a hash, and a pipeline of HINCRBYFLOAT adds to it.
``watch``: the whole array is one string; WATCH, GET, an addition in numpy, MULTI, SET, EXEC, and again on a conflict.

Neither survives a lost connection or a late worker. Sparse rows are divided by the number of gradients that held them,
so counts are kept as well. The taker asks for the number of gradients every millisecond.
"""

import platform
import time

import common
import numpy as np
import redis

POLL = 0.001  # seconds


class Peer(common.Actor):
    """A worker or a taker, whose method a subclass has."""

    def __init__(self, settings):
        super().__init__(settings)
        self.client = redis.Redis.from_url(settings["url"])

    def versions(self):
        """Returns the versions of the packages in use."""
        return {"python": platform.python_version(), "redis": redis.__version__, "numpy": np.__version__}

    def ready(self, job):
        """Prepares a job; this is not timed."""
        super().ready(job)
        self.client.ping()
        if self.settings["role"] == "worker":
            self.gradient(job["workload"], self.settings["number"], job["variant"])

    def go(self):
        """Applies a gradient, or waits for the round and takes it."""
        name = self.job["workload"]
        if self.settings["role"] == "worker":
            indices, values = self.gradient(name, self.settings["number"], self.job["variant"])
            self.apply(name, indices, values)
            return None
        while int(self.client.get(f"{name}:number") or 0) < self.job["num_required"]:
            time.sleep(POLL)
        return self.take(name)


class Hincrbyfloat(Peer):
    """Keeps every element in a field of a hash."""

    def apply(self, name, indices, values):
        """Adds a gradient element by element."""
        pipeline = self.client.pipeline(transaction=False)
        if indices is None:
            for place, value in enumerate(values.ravel().tolist()):
                pipeline.hincrbyfloat(f"{name}:sums", place, value)
        else:
            for index, row in zip(indices.tolist(), values.tolist(), strict=True):
                for column, value in enumerate(row):
                    pipeline.hincrbyfloat(f"{name}:sums", f"{index}:{column}", value)
                pipeline.hincrby(f"{name}:counts", index, 1)
        pipeline.incr(f"{name}:number")
        pipeline.execute()

    def take(self, name):
        """Returns the mean, and removes it."""
        keys = [f"{name}:sums", f"{name}:counts", f"{name}:number"]
        pipeline = self.client.pipeline()
        sums, counts, number, _ = pipeline.hgetall(keys[0]).hgetall(keys[1]).get(keys[2]).delete(*keys).execute()
        workload = self.workloads[name]
        if workload["kind"] == "dense":
            total = np.empty(workload["shape"], np.float32)
            for field, value in sums.items():
                total.flat[int(field)] = float(value)
            return None, total / np.float32(int(number))
        held = np.array(sorted(int(index) for index in counts), np.int64)
        place = {index: k for k, index in enumerate(held.tolist())}
        total = np.empty((len(held), workload["shape"][1]), np.float32)
        for field, value in sums.items():
            index, column = field.split(b":")
            total[place[int(index)], int(column)] = float(value)
        divisor = np.array([int(counts[str(index).encode()]) for index in held.tolist()], np.float32)
        return held, total / divisor[:, np.newaxis]


class Watch(Peer):
    """Keeps the whole array in one string."""

    def apply(self, name, indices, values):
        """Adds a gradient, and tries again if the string was changed meanwhile."""
        shape = tuple(self.workloads[name]["shape"])
        while True:
            with self.client.pipeline() as pipeline:
                pipeline.watch(f"{name}:table")
                table, counts = self.parse(pipeline.get(f"{name}:table"), shape)
                if indices is None:
                    table += values
                    counts += 1
                else:
                    table[indices] += values
                    counts[indices] += 1
                pipeline.multi()
                pipeline.set(f"{name}:table", table.tobytes() + counts.tobytes())
                pipeline.incr(f"{name}:number")
                try:
                    pipeline.execute()
                except redis.WatchError:
                    continue
                return

    @staticmethod
    def parse(data, shape):
        """Returns sums and counts of a stored string."""
        if data is None:
            return np.zeros(shape, np.float32), np.zeros(shape[0], np.int32)
        split = int(np.prod(shape)) * 4
        table = np.frombuffer(data[:split], np.float32).reshape(shape).copy()
        return table, np.frombuffer(data[split:], np.int32).copy()

    def take(self, name):
        """Returns the mean, and removes it."""
        keys = [f"{name}:table", f"{name}:number"]
        data, _ = self.client.pipeline().get(keys[0]).delete(*keys).execute()
        workload = self.workloads[name]
        table, counts = self.parse(data, tuple(workload["shape"]))
        if workload["kind"] == "dense":
            return None, table / np.float32(counts[0])
        held = np.flatnonzero(counts)
        return held, table[held] / counts[held, np.newaxis].astype(np.float32)


common.serve(lambda settings: {"hincrbyfloat": Hincrbyfloat, "watch": Watch}[settings["method"]](settings))
