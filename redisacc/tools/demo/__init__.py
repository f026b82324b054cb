"""The demo: several processes train word vectors (skip-gram with negative sampling) over Redis.

Read ``training`` first: it is the program that each process runs. ``text`` turns text into word numbers, ``skipgram``
is the model in plain numpy, and ``settings`` is what a user chooses.
"""

from redisacc.errors import RedisAccError


class DemoError(RedisAccError):
    """The demo cannot continue. The message is written for the person at the terminal."""
