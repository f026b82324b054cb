"""Optimizers as names and numbers, for updates that run next to the data.

Each follows the optimizer of the same name in torch: its names of options, its defaults, its state, and its order of
operations. Lion, which torch lacks, follows the paper's own code.

Example:
    >>> import redisacc
    >>> optimizer = redisacc.optim.AdamW(1e-3, weight_decay=0.01, no_decay=["*/bias"], clip_norm=1.0)
    >>> optimizer.slots
    ('exp_avg', 'exp_avg_sq')

A learning rate that changes is a function of the step, which counts from 0. It runs in the chief only:

    >>> import math
    >>> def cosine(step):
    ...     return 1e-3 * min(1, (step + 1) / 100) * (1 + math.cos(math.pi * min(step / 10_000, 1))) / 2
    >>> optimizer = redisacc.optim.Adam(cosine, lr_factor={"embedding/*": 0.1}, ema=0.999)
    >>> optimizer.slots
    ('exp_avg', 'exp_avg_sq', 'ema')
"""

from redisacc.optim import algorithms
from redisacc.optim.algorithms import *  # noqa: F403 - a new optimizer is one file
from redisacc.optim.base import Optimizer

__all__ = ["Optimizer"]
__all__ += algorithms.__all__
