"""Buffers a gradient in the accumulator's slot: commands stage its parts, and a script admits them."""

from __future__ import annotations

from collections.abc import Sequence

from redisacc._format import buffered as buffered_format
from redisacc._format.buffered import PART_MS, BufferedGradient, message_bytes, part_ms
from redisacc._format.keys import Keys
from redisacc._format.staging import parts_arrived
from redisacc._format.weights import weight_text
from redisacc._protocol.scripts import Reply, Scripts
from redisacc._protocol.sessions import GradientRequest
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
    expiry = str(part_ms(len(parts) * parts[0].nbytes)) if parts else ""
    for number, part in enumerate(parts):
        # The script announces the last ones.
        if announced and unannounced >= worth_a_message:
            commands.append(Hint(("PUBLISH", keys.wake, parts_arrived(gradient_id, number))))
            unannounced = 0
        # NX: this may arrive again, also when the gradient counts.
        commands.append(("SET", keys.part(gradient_id, number), part, "NX", "PX", expiry))
        unannounced += part.nbytes
    return commands


def buffer(
    scripts: Scripts,
    keys: Keys,
    request: GradientRequest,
    *,
    gradient: str,
    header: bytes,
    data: bytes,
    lengths: Sequence[int],
    ahead_bytes: int,
    replaced: Sequence[BufferedGradient] = (),
    summed_weight: float = 1.0,
    before: Sequence[Command] = (),
) -> Reply:
    """Buffers a gradient in one slot.

    Args:
        scripts: the scripts of the accumulator.
        keys: its keys.
        request: the request that applies it.
        gradient: its id.
        header: its header; empty to ask only whether it would be accepted.
        data: all bytes of an inline gradient; empty if it has parts.
        lengths: the length of each part in bytes.
        ahead_bytes: from how many bytes on it wakes a waiting taker to fetch it ahead.
        replaced: the buffered gradients whose sum is part of it, the oldest first.
        summed_weight: the weight that the gradient of the request has in that sum.
        before: commands that stage the parts, in the same round trip.
    """
    return scripts.buffer(
        **request.arguments(),
        notes=request.notes,
        summed_weight=weight_text(summed_weight) if replaced else "",
        gradient=gradient,
        order=request.order,
        header=header,
        data=data,
        ahead_bytes=ahead_bytes,
        lengths=lengths,
        replaced=[buffered.id for buffered in replaced] if replaced else (),
        place=[keys.place(gradient)] if lengths and not replaced else (),
        parts=keys.parts(gradient, len(lengths)),
        replaced_parts=[key for buffered in replaced for key in buffered_format.part_keys(keys, buffered)]
        if replaced
        else (),
        before=before,
        replicated=bool(header),
    )


def staging(scripts: Scripts, request: GradientRequest, *, gradient: str, header: bytes, holds_ms: int = 0) -> Hint:
    """Returns the call that gives a gradient its place, and announces it. Its reply is not needed.

    Args:
        scripts: the scripts of the accumulator.
        request: the request that will apply it.
        gradient: its id.
        header: its header.
        holds_ms: for how long it keeps its place although nothing arrives, in milliseconds; 0: as usual.
    """
    about = request.arguments()
    return scripts.hint(
        "stage",
        worker=request.worker,
        local_step=request.local_step,
        once=request.once,
        round_shape=about["round_shape"],
        weight=about["weight"],
        gradient=gradient,
        order=request.order,
        header=header.hex(),
        holds_ms=holds_ms,
        expiry_ms=PART_MS,
    )
