"""Crosses into Lua: for each script of an accumulator one typed function, with the script's name.

Only these modules pass keys and arguments to the scripts, by the names in their headers, and read their replies. A
refusal becomes an exception here. The header of each file in ``lua/`` describes what the script does, its
keys and arguments, and every reply.
"""

from __future__ import annotations

from redisacc._protocol.scripts.applying import ApplyScripts
from redisacc._protocol.scripts.deleting import DeleteScripts
from redisacc._protocol.scripts.opening import OpenScript
from redisacc._protocol.scripts.taking import TakeScripts


class Scripts(OpenScript, ApplyScripts, TakeScripts, DeleteScripts):
    """Runs every script on one accumulator."""
