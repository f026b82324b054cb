"""The demo: word vectors (skip-gram with negative sampling) trained by several processes over shared
accumulators.

``text`` turns text into word numbers, ``skipgram`` is the model in plain numpy, ``exchange`` is what travels
through Redis beside the gradients, ``training`` holds the roles (chief, worker, and the same thing in one
process), and ``processes`` starts the workers on this machine. The command itself is ``redisacc.cli.demo``.
"""

from __future__ import annotations


class DemoError(Exception):
    """The demo can't go on; the message says why, in words for the person at the terminal."""
