"""torch.distributed's all_reduce over gloo: every worker is a rank, and all ranks get the sum; rank 0 is checked.

It does less than redisacc: ranks are fixed, each must take part in every round, there is no step, and no state survives
a process. A sparse all_reduce returns only sums, so only sums are checked.
"""

import os
import platform

import common
import numpy as np
import torch
import torch.distributed as dist


def join(settings):
    """Makes this process a rank."""
    # All ranks share the machine.
    torch.set_num_threads(1)
    if "interface" in settings:
        # Otherwise gloo looks for the address of the machine's name, which another host has.
        os.environ["GLOO_SOCKET_IFNAME"] = settings["interface"]
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{settings.get('address', '127.0.0.1')}:{settings['port']}",
        rank=settings["number"],
        world_size=settings["workers"],
    )


def versions():
    """Returns the versions of the packages in use."""
    return {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}


class Rank(common.Actor):
    """One rank."""

    def __init__(self, settings):
        super().__init__(settings)
        join(settings)

    versions = staticmethod(versions)

    def ready(self, job):
        """Prepares a job; this is not timed."""
        super().ready(job)
        indices, values = self.gradient(job["workload"], self.settings["number"], job["variant"])
        # all_reduce overwrites its argument.
        tensor = torch.from_numpy(values.copy())
        if indices is not None:
            shape = tuple(self.workloads[job["workload"]]["shape"])
            tensor = torch.sparse_coo_tensor(
                torch.from_numpy(indices)[None], tensor, shape, is_coalesced=True, check_invariants=False
            )
        self.tensor = tensor

    def go(self):
        """Reduces the gradient, and returns the result on rank 0."""
        dist.all_reduce(self.tensor)
        result = self.tensor
        if not result.is_sparse:
            result /= self.settings["workers"]
            found = None, result.numpy()
        else:
            result = result.coalesce()
            found = result.indices()[0].numpy(), result.values().numpy()
        return found if self.settings["number"] == 0 else None

    def check(self, result):
        """Checks the mean, or the sum if the gradient is sparse."""
        job = self.job
        indices, mean, counts = self.expected(job["workload"], job["workers"], job["variant"])
        if result[0] is None:
            common.compare(job, result, (None, mean))
        else:
            common.compare(job, result, (indices, mean * counts[:, np.newaxis].astype(np.float32)))


if __name__ == "__main__":
    common.serve(Rank)
