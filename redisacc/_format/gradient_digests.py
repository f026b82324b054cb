"""Digests of buffered gradients, under which a reducer stores their sum.

A digest names the gradients that a sum contains, in their order. A taker computes the digest of the gradients in its
round itself. So it never uses the sum of other gradients, and it need not trust any message.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from redisacc._format.buffered import BufferedGradient
from redisacc._format.weights import weight_text

# In bytes: long enough that two rounds never have the same digest by chance.
_SIZE = 16

DIGEST = re.compile(rf"[0-9a-f]{{{2 * _SIZE}}}")


def digest_of(gradients: Iterable[BufferedGradient]) -> str:
    """Returns the digest of gradients in this order, as hexadecimal digits.

    It covers the id of each, which no two gradients share, its place, its weight, and its header: the number of
    gradients that it is the sum of and their weight, the dtype and shape of each section, and the length of each part.
    """
    found = hashlib.blake2b(digest_size=_SIZE)
    for gradient in gradients:
        place = f"{gradient.order}*{weight_text(gradient.factor)}"
        found.update(f"{gradient.id} {place} {gradient.header_digest} ".encode())
    return found.hexdigest()
