"""A worker or a taker of redisacc."""

import importlib.metadata
import platform

import common

import redisacc


class Peer(common.Actor):
    def __init__(self, settings):
        super().__init__(settings)
        self.opened = {}
        self.step = 0

    def versions(self):
        names = ("redisacc", "redis", "hiredis", "numpy", "msgpack")
        return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}

    def accumulator(self, name):
        if name not in self.opened:
            workload = self.workloads[name]
            kind = (
                redisacc.SparseConditionalAccumulator
                if workload["kind"] == "sparse"
                else redisacc.ConditionalAccumulator
            )
            self.opened[name] = kind(
                "float32",
                workload["shape"],
                name,
                redis=self.settings["url"],
                in_place_limit=workload["in_place_limit"],
            )
        return self.opened[name]


class Worker(Peer):
    def ready(self, job):
        super().ready(job)
        self.accumulator(job["workload"])
        self.gradient(job["workload"], self.settings["number"], job["variant"])

    def go(self):
        job = self.job
        acc = self.accumulator(job["workload"])
        indices, values = self.gradient(job["workload"], self.settings["number"], job["variant"])
        for _ in range(job["repeat"]):
            if indices is None:
                result = acc.apply_grad(values, local_step=job["step"])
            else:
                result = acc.apply_grad(indices, values, local_step=job["step"])
            if not result:
                raise common.WrongResult(f"{job}: {result}")


class Taker(Peer):
    def ready(self, job):
        super().ready(job)
        self.accumulator(job["workload"])

    def go(self):
        acc = self.accumulator(self.job["workload"])
        taken = acc.take_grad(self.job["num_required"], timeout=120)
        return (None, taken) if isinstance(acc, redisacc.ConditionalAccumulator) else taken[:2]

    def check(self, result):
        super().check(result)
        # What is right and came too late, or twice, would show in the next round only.
        step = self.accumulator(self.job["workload"]).global_step()
        if step != self.job["step"] + 1:
            raise common.WrongResult(f"after {self.job} the step is {step}")


common.serve(lambda settings: (Worker if settings["role"] == "worker" else Taker)(settings))
