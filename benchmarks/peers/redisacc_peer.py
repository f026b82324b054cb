"""A worker or a taker of redisacc."""

import importlib.metadata
import platform

import common

import redisacc


def versions():
    """Returns the versions of the packages in use."""
    names = ("redisacc", "redis", "hiredis", "numpy", "msgpack")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


def limited(in_place_limit):
    """Returns the option that limits what is added in place, also for an early version of redisacc."""
    if hasattr(redisacc, "Limits"):
        return {"limits": redisacc.Limits(in_place_limit)}
    return {"in_place_limit": in_place_limit}


class Peer(common.Actor):
    """A process with handles on the accumulators of its workloads."""

    def __init__(self, settings):
        super().__init__(settings)
        self.opened = {}
        self.step = 0

    versions = staticmethod(versions)

    def accumulator(self, name):
        """Returns the handle for a workload."""
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
                **limited(workload["in_place_limit"]),
                **self.settings.get("options", {}),
            )
        return self.opened[name]


class Worker(Peer):
    """Applies gradients."""

    def ready(self, job):
        """Prepares a job; this is not timed."""
        super().ready(job)
        self.accumulator(job["workload"])
        self.gradient(job["workload"], self.settings["number"], job["variant"])

    def go(self):
        """Applies the gradient as often as the job says."""
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
    """Takes rounds."""

    def ready(self, job):
        """Prepares a job; this is not timed."""
        super().ready(job)
        self.accumulator(job["workload"])

    def go(self):
        """Takes the round."""
        acc = self.accumulator(self.job["workload"])
        taken = acc.take_grad(self.job["num_required"], timeout=120)
        return (None, taken) if isinstance(acc, redisacc.ConditionalAccumulator) else taken[:2]

    def check(self, result):
        """Checks the result and the step."""
        super().check(result)
        # A gradient that came too late, or twice, would otherwise be noticed only in the next round.
        step = self.accumulator(self.job["workload"]).global_step()
        if step != self.job["step"] + 1:
            raise common.WrongResult(f"after {self.job} the step is {step}")


if __name__ == "__main__":
    common.serve(lambda settings: (Worker if settings["role"] == "worker" else Taker)(settings))
