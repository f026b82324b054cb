"""Trains PyTorch models in several processes: an optimizer whose steps they make together.

Needs torch (``pip install 'redisacc[torch]'``).
"""

from redisacc.torch._optimizer import Optimizer
from redisacc.torch._sampler import Sampler

__all__ = ["Optimizer", "Sampler"]
