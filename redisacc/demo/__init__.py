"""The demo: several processes train word vectors (skip-gram with negative sampling) over shared accumulators.

``text`` turns text into word numbers. ``skipgram`` is the model in plain numpy. ``exchange`` is what travels through
Redis beside the gradients. ``training`` has the roles: chief, worker, and the same training in one process.
``processes`` starts the workers on this machine. The command itself is ``redisacc.cli.demo``.
"""

from __future__ import annotations


class DemoError(Exception):
    """The demo cannot continue. The message is written for the person at the terminal."""
