"""Weights by torch.distributed's broadcast over gloo, from rank 0 to all others."""

import common
import torch
import torch.distributed as dist
from torch_gloo import join, versions
from weights import WeightsActor


class Rank(WeightsActor):
    """One rank."""

    def __init__(self, settings):
        super().__init__(settings)
        join(settings)

    versions = staticmethod(versions)

    def prepare(self):
        """Makes the tensor that is sent, or received into."""
        self.tensor = torch.from_numpy(self.weights.copy())
        if not self.publishes:
            self.tensor.zero_()

    def publish(self):
        """Sends the tensor."""
        dist.broadcast(self.tensor, 0)

    def read(self):
        """Receives the tensor."""
        dist.broadcast(self.tensor, 0)
        return self.tensor.numpy()


common.serve(Rank)
