"""Reads the bytes of inline gradients, many in one round trip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from redisacc._format.buffered import BufferedGradient, PartMissingError
from redisacc._format.keys import RoundKeys
from redisacc._wire.transport import Transport
from redisacc.errors import CorruptDataError

# Maximum number of inline gradients that one command fetches, so that no command holds the server for long.
INLINE_FIELDS = 16

# About how much is fetched in one round trip.
FETCH_BYTES = 16 * 2**20
FETCH_GRADIENTS = 1000

_NOTHING: Mapping[bytes, bytes] = MappingProxyType({})


class InlineReader:
    """Reads inline gradients in the order in which they are asked for, and some of them before that.

    Args:
        transport: the way to the server.
        of: the hashes of the round that they are in.
        gradients: buffered gradients in the order in which they will be asked for. Those with parts are left out.
        known: fields of the round's ``inline`` hash that have been read already.
    """

    def __init__(
        self,
        transport: Transport,
        of: RoundKeys,
        gradients: Sequence[BufferedGradient],
        known: Mapping[bytes, bytes] = _NOTHING,
    ) -> None:
        self._transport = transport
        self._of = of
        self._gradients = [gradient for gradient in gradients if gradient.inline]
        self._next = 0
        self._known = known
        self._fetched: dict[str, bytes | None] = {}

    def expect(self, gradients: Sequence[BufferedGradient]) -> None:
        """Notes gradients that will be asked for after all others."""
        self._gradients += [gradient for gradient in gradients if gradient.inline]

    def where(self, gradient: BufferedGradient) -> str:
        """Returns where the bytes of a gradient are, for errors."""
        return f"{self._of.inline} {gradient.id}"

    def read(self, gradient: BufferedGradient) -> bytes:
        """Returns the bytes of a gradient.

        Raises:
            PartMissingError: the hash does not have it.
            CorruptDataError: it is not as long as its header says.
        """
        data: bytes | None = b""
        if gradient.nbytes:
            data = self._known.get(gradient.id.encode())
            while data is None and gradient.id not in self._fetched and self._next < len(self._gradients):
                self._fetch()
            if data is None and gradient.id not in self._fetched:
                # It was asked for before, or never expected.
                self._gradients.append(gradient)
                self._fetch()
            if data is None:
                data = self._fetched.pop(gradient.id)
        if data is None:
            raise PartMissingError(self.where(gradient))
        if len(data) != gradient.nbytes:
            raise CorruptDataError(
                f"{self.where(gradient)} has {len(data)} bytes, and its header says {gradient.nbytes}"
            )
        return data

    def _fetch(self) -> None:
        """Fetches the next ones."""
        ids: list[str] = []
        size = 0
        while self._next < len(self._gradients) and size < FETCH_BYTES and len(ids) < FETCH_GRADIENTS:
            gradient = self._gradients[self._next]
            self._next += 1
            if gradient.nbytes and gradient.id.encode() not in self._known:
                ids.append(gradient.id)
                size += gradient.nbytes
        asked = [ids[start : start + INLINE_FIELDS] for start in range(0, len(ids), INLINE_FIELDS)]
        replies = self._transport.pipeline([("HMGET", self._of.inline, *some) for some in asked])
        for some, reply in zip(asked, replies, strict=True):
            self._fetched.update(zip(some, reply, strict=True))
