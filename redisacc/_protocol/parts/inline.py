"""Reads the bytes of inline gradients, many in one round trip."""

from __future__ import annotations

from collections import deque
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
        self._expected = deque([gradient for gradient in gradients if gradient.inline and gradient.nbytes])
        self._known = known
        self._fetched: dict[str, bytes | None] = {}

    def expect(self, gradients: Sequence[BufferedGradient]) -> None:
        """Notes gradients that will be asked for after all others."""
        self._expected += [gradient for gradient in gradients if gradient.inline and gradient.nbytes]

    def where(self, gradient: BufferedGradient) -> str:
        """Returns where the bytes of a gradient are, for errors."""
        return f"{self._of.inline} {gradient.id}"

    def read(self, gradient: BufferedGradient) -> bytes:
        """Returns the bytes of a gradient.

        Raises:
            PartMissingError: the hash does not have it.
            CorruptDataError: it is not as long as its header says.
        """
        data = self._known.get(gradient.id.encode()) if gradient.nbytes else b""
        if data is None:
            if gradient.id not in self._fetched:
                self._fetch(gradient)
            data = self._fetched.pop(gradient.id)
        if data is None:
            raise PartMissingError(self.where(gradient))
        if len(data) != gradient.nbytes:
            raise CorruptDataError(
                f"{self.where(gradient)} has {len(data)} bytes, and its header says {gradient.nbytes}"
            )
        return data

    def _fetch(self, gradient: BufferedGradient) -> None:
        """Fetches a gradient, and with it the next ones that are expected."""
        ids, size = [gradient.id], gradient.nbytes
        while self._expected and size < FETCH_BYTES and len(ids) < FETCH_GRADIENTS:
            following = self._expected.popleft()
            if following.id != gradient.id and following.id.encode() not in self._known:
                ids.append(following.id)
                size += following.nbytes
        asked = [ids[start : start + INLINE_FIELDS] for start in range(0, len(ids), INLINE_FIELDS)]
        replies = self._transport.pipeline([("HMGET", self._of.inline, *some) for some in asked])
        for some, reply in zip(asked, replies, strict=True):
            self._fetched.update(zip(some, reply, strict=True))
