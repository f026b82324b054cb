"""Buffers gradients: the client stages the parts of a large one by SET, and a script adds them to the round."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from redisacc._clock import durations
from redisacc._data.gradient import Gradient
from redisacc._data.spec import AccumulatorSpec
from redisacc._format import buffered as buffered_format
from redisacc._format.buffered import BufferedGradient
from redisacc._format.keys import Keys
from redisacc._format.staging import ANNOUNCED_HEADER
from redisacc._format.upload_layout import UploadLayout
from redisacc._protocol.applying.compaction import Compactor, no_room
from redisacc._protocol.applying.partition_writer import PartitionWriter
from redisacc._protocol.applying.upload import PartitionedUpload, StagedUpload, Upload
from redisacc._protocol.parts.staging import buffer, stage_commands, staging
from redisacc._protocol.scripts import COUNTED, Reply, Scripts
from redisacc._protocol.sessions import GradientRequest
from redisacc._redis.running_time import running_time
from redisacc._redis.transport import Transport
from redisacc._telemetry.telemetry import Telemetry
from redisacc._text import shown
from redisacc.errors import ServerError

# For a gradient of more bytes than this, the server is asked first whether it would accept it: a round trip takes less
# time than an upload for nothing.
ASK_BYTES = 4 * 2**20


NOT_COMPACTED = (
    "with order='worker' they are not compacted, because that would change the order in which gradients are added: the "
    "limit has to have room for a gradient of each worker"
)


class BufferWriter:
    """Buffers gradients of one accumulator."""

    def __init__(
        self,
        transport: Transport,
        keys: Keys,
        scripts: Scripts,
        spec: AccumulatorSpec,
        telemetry: Telemetry,
        *,
        partitions: PartitionWriter | None = None,
        inline_bytes: int | None = None,
    ) -> None:
        """Initialises the writer.

        Args:
            transport: the way to the server.
            keys: the keys of the accumulator.
            scripts: its scripts.
            spec: its specification.
            telemetry: hears of compactions.
            partitions: writes the parts of gradients to partitions; None: the accumulator has none.
            inline_bytes: larger gradients are sent in parts; None: those of more than INLINE_BYTES.
        """
        self._transport = transport
        self._keys = keys
        self._partitions = partitions
        self._inline_bytes = buffered_format.INLINE_BYTES if inline_bytes is None else inline_bytes
        # Gradients of at least so many bytes are announced before their parts, and then leave part by part.
        self.announced_bytes = buffered_format.ANNOUNCED_INLINES * self._inline_bytes
        self._scripts = scripts
        self._by_worker = spec.order == "worker"
        self._compactor = Compactor(transport, keys, spec, telemetry)

    def begin(self, layout: UploadLayout, request: GradientRequest) -> Upload:
        """Begins an upload whose parts leave one by one."""
        if self._partitions is None:
            return StagedUpload(
                self._transport, self._keys, self._scripts, layout, request, ahead_bytes=self.announced_bytes
            )
        writer = self._partitions
        return PartitionedUpload(
            self._transport,
            self._keys,
            writer.scripts,
            layout,
            request,
            ahead_bytes=self.announced_bytes,
            writer=writer,
        )

    def buffer(self, gradient: Gradient, request: GradientRequest) -> Reply:
        """Buffers a gradient.

        Raises:
            AccumulatorFullError: the buffer limit is reached, and compacting frees too little, or would change the
                order in which gradients are added.
        """
        deadline = running_time() + durations.call
        ask_first = gradient.nbytes > ASK_BYTES
        while True:
            reply = self._send(gradient, request, ask=ask_first)
            if reply.outcome in COUNTED:
                return reply
            if reply.outcome == "would_accept":
                reply = self._send(gradient, request)
            if reply.outcome == "full":
                if self._by_worker:
                    raise no_room(self._keys, gradient, reply, NOT_COMPACTED)
                ask_first = True
                reply = self._compactor.make_room(gradient, request, reply, self._send)
            if reply.outcome in COUNTED:
                return reply
            if running_time() >= deadline:
                if reply.outcome == "full":
                    why = f"for {durations.call:.0f} s, other workers filled the space that compacting freed"
                    raise no_room(self._keys, gradient, reply, why)
                raise ServerError(
                    f"a gradient for {shown(self._keys.name)} could not be buffered in {durations.call:.0f} s: its "
                    "parts disappeared every time"
                )

    def _send(
        self,
        gradient: Gradient,
        request: GradientRequest,
        replaced: Sequence[BufferedGradient] = (),
        summed_weight: float = 1.0,
        *,
        ask: bool = False,
    ) -> Reply:
        # A request that is sent again has the same id, so that it writes the same keys. A sum has an id of its own,
        # so that a late copy of parts that were written before is not taken for its own.
        name = f"{request.session.id}-{request.sequence}"
        in_partitions = self._partitions is not None and gradient.nbytes > self._inline_bytes
        if in_partitions or replaced:
            name += f"-{secrets.token_hex(4)}"
        if self._partitions is not None and in_partitions:
            # Registering asks whether it would be accepted. Every attempt has its own names: after a failover, the
            # leader may reuse the number for another attempt, while a sweeper is still removing the parts of this one.
            return self._partitions.send(
                gradient,
                request,
                name,
                replaced,
                summed_weight=summed_weight,
                announced_bytes=self.announced_bytes,
            )
        announced = gradient.nbytes >= self.announced_bytes and not replaced
        packed = buffered_format.pack(gradient, self._inline_bytes)
        stage = stage_commands(self._keys, name, packed.parts, announced=announced) if packed.parts else []
        if announced and stage and len(packed.header) <= ANNOUNCED_HEADER and not ask:
            stage = [staging(self._scripts, request, gradient=name, header=packed.header), *stage]
        # Sending an inline gradient costs no more than asking.
        ask = ask and not packed.data
        return buffer(
            self._scripts,
            self._keys,
            request,
            gradient=name,
            header=b"" if ask else packed.header,
            data=packed.data,
            lengths=packed.lengths,
            ahead_bytes=self.announced_bytes,
            replaced=replaced,
            summed_weight=summed_weight,
            before=() if ask else stage,
        )
