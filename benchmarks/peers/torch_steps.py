"""Training as torch does it over gloo: one all_reduce of all gradients, and the same update on each rank.

As in DistributedDataParallel, gradients are copied into one bucket that is reduced in place. There is no chief.
"""

import common
import numpy as np
import torch
import torch.distributed as dist
from steps import StepActor
from torch_gloo import join
from torch_gloo import versions as torch_versions


class Rank(StepActor):
    """One rank."""

    def __init__(self, settings):
        super().__init__(settings)
        join(settings)
        self.gradients = [self.flat(self.gradient(variant)) for variant in range(2)]
        self.own = self.flat(self.initial)
        self.bucket = torch.empty_like(self.own)

    versions = staticmethod(torch_versions)

    def flat(self, arrays):
        """Returns all arrays as one tensor."""
        return torch.from_numpy(np.concatenate([arrays[name].reshape(-1) for name in self.dense]))

    def weights(self):
        """Returns the weights that this process has."""
        found, start = {}, 0
        for name in self.dense:
            shape = self.initial[name].shape
            size = int(np.prod(shape))
            found[name] = self.own[start : start + size].numpy().reshape(shape)
            start += size
        return found

    def go(self):
        """Does this rank's part of each step."""
        for _ in range(self.job["repeat"]):
            self.bucket.copy_(self.gradients[self.step % 2])
            dist.all_reduce(self.bucket)
            self.own.sub_(self.bucket, alpha=self.rate / self.settings["workers"])
            self.step += 1


common.serve(Rank)
