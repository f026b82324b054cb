"""Waits until replicas have a version of parameters: its record, and its parts in partitions.

Replicas confirm what a connection has written, so this writes something that changes no value: the number of replicas
into the record, and nothing to the end of each part. Their confirmation then covers every earlier write of the same
server, also those of a publisher who died, and those that were sent twice (see ``parts/write.py``).
"""

from __future__ import annotations

from collections.abc import Iterable

from redisacc._format.keys import ParameterKeys
from redisacc._format.parameter_record import Blob
from redisacc._protocol.parts.write import by_partition
from redisacc._protocol.scripts import OF_PARAMETERS, Scripts, confirmed, wait_commands
from redisacc._text import shown
from redisacc._wire.transport import Transport
from redisacc.errors import NotReplicatedError


def confirm_version(
    transport: Transport,
    keys: ParameterKeys,
    *,
    incarnation: str,
    step: int,
    blobs: Iterable[Blob],
    min_replicas: int,
) -> None:
    """Blocks until replicas have a version that was published, for up to 5 s for its parts, and 5 s for its record.

    Args:
        transport: the way to the server, or to the nodes.
        keys: the keys of the parameters, with their partitions.
        incarnation: which parameters of that name.
        step: the step of the version, for the error.
        blobs: its blobs. Those in the slot of the record are covered by its confirmation.
        min_replicas: how many replicas of each node must have it, 1 or more.

    Raises:
        NotReplicatedError: fewer have confirmed it in time. The version is published all the same.
        NotFoundError: the parameters were deleted.
    """
    counts = []
    if keys.partitions:
        batches = by_partition([key for blob in blobs for key in blob.keys(keys)])
        after = wait_commands(min_replicas)
        found = transport.scatter([[("APPEND", key, b"") for key in batch] for batch in batches], after=after)
        counts += [confirmed(batch[0], replies[-1:]) for batch, replies in zip(batches, found, strict=True)]
    counts.append(
        Scripts(transport, keys, OF_PARAMETERS, min_replicas=min_replicas)
        .amend(
            incarnation=incarnation,
            event="confirming",
            fields=["min_replicas", str(min_replicas)],
            replicated=True,
        )
        .replicas
    )
    if min(counts) < min_replicas:
        raise NotReplicatedError(
            f"parameters {shown(keys.name)}: step {step} is published, but only {min(counts)} of the {min_replicas} "
            "replicas that should have it confirmed it in time. If their master fails now, the step is lost. Publish "
            "the same again, which waits again",
            replicas=min(counts),
            min_replicas=min_replicas,
        )
