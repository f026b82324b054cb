"""Trainings of PyTorch models: an optimizer whose steps several processes make together.

Needs torch (``pip install 'redisacc[torch]'``).
"""

from redisacc.torch._optimizer import Optimizer
from redisacc.torch._sampler import Sampler

__all__ = ["Optimizer", "Sampler"]
