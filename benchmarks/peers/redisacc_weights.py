"""Weights by redisacc's Parameters."""

import common
from redisacc_peer import versions
from weights import WeightsActor

import redisacc


class Peer(WeightsActor):
    """A process with handles on the parameters of its workloads."""

    def __init__(self, settings):
        super().__init__(settings)
        self.opened = {}

    versions = staticmethod(versions)

    def prepare(self):
        """Opens the parameters."""
        if self.name not in self.opened:
            options = self.settings.get("parameters", {})
            self.opened[self.name] = redisacc.Parameters(self.name, redis=self.settings["url"], **options)

    def publish(self):
        """Publishes weights as the next step."""
        self.opened[self.name].publish({"weights": self.weights}, self.job["step"] + 1)

    def read(self):
        """Waits for the next step."""
        step, tree = self.opened[self.name].wait(after=self.job["step"], timeout=120)
        if step != self.job["step"] + 1:
            raise common.WrongResult(f"{self.job}: got step {step}")
        return tree["weights"]


if __name__ == "__main__":
    common.serve(Peer)
