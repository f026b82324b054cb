"""The commands that stage the parts of a gradient in the accumulator's slot, where a script will admit them."""

from __future__ import annotations

from collections.abc import Sequence

from redisacc._format.buffered import message_bytes, staging_ms
from redisacc._format.keys import Keys
from redisacc._format.staging import parts_arrived
from redisacc._redis.sockets.fast_socket import Command, Pieces
from redisacc._redis.transport import Hint


def stage_commands(
    keys: Keys, gradient_id: str, parts: Sequence[memoryview | Pieces], *, announced: bool = False
) -> list[Command]:
    """Returns the commands that store parts where the script expects them.

    Args:
        keys: the keys of the accumulator.
        gradient_id: the id of the gradient.
        parts: its parts.
        announced: whether parts are announced when they have arrived.
    """
    commands: list[Command] = []
    unannounced, worth_a_message = 0, message_bytes()
    # The last part is the only one that may be smaller.
    expiry = str(staging_ms(len(parts) * parts[0].nbytes)) if parts else ""
    for number, part in enumerate(parts):
        # The script announces the last ones.
        if announced and unannounced >= worth_a_message:
            commands.append(Hint(("PUBLISH", keys.wake, parts_arrived(gradient_id, number))))
            unannounced = 0
        commands.append(("SET", keys.staged(gradient_id, number), part, "PX", expiry))
        unannounced += part.nbytes
    return commands
