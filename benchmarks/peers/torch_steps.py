"""Training as torch does it over gloo: one all_reduce of all gradients, and the same update on each rank.

As in DistributedDataParallel, gradients are copied into one bucket that is reduced in place. There is no chief.
"""

import common
import torch
import torch.distributed as dist
from steps import FlatActor
from torch_gloo import join
from torch_gloo import versions as torch_versions


class Rank(FlatActor):
    """One rank."""

    def __init__(self, settings):
        super().__init__(settings)
        join(settings)
        self.gradients = [torch.from_numpy(self.packed(self.gradient(variant))) for variant in range(2)]
        # The same memory.
        self.tensor = torch.from_numpy(self.own)
        self.bucket = torch.empty_like(self.tensor)

    versions = staticmethod(torch_versions)

    def go(self):
        """Does this rank's part of each step."""
        for _ in range(self.job["repeat"]):
            self.bucket.copy_(self.gradients[self.step % 2])
            dist.all_reduce(self.bucket)
            self.tensor.sub_(self.bucket, alpha=self.rate / self.settings["workers"])
            self.step += 1


common.serve(Rank)
