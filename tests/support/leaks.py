"""Finds leaked keys: every key must expire soon or have an owner."""

from __future__ import annotations

import re

import msgpack

from redisacc._clock import clock

# The longest expiry, in milliseconds: that of parts that no round has yet, and of the leases of private accumulators.
LONGEST = 60_000
# Leases that have run out are remembered for longer, so that messages can say who is gone.
CREW = 3_600_000

# The mark of a deletion, which a process may find after days.
DELETED = 7 * 86_400_000

_KEY = re.compile(rb"redisacc:\{([^{}]+)\}(?::(.+))?", re.DOTALL)

# The record of parameters of which no version has been published expires after its publisher's attempt.
BEGUN = 2 * LONGEST

# Keys that an accumulator may have for as long as it lives.
LASTING = {b"sessions", b"taken", b"recovered"}
# Keys that it may have while its round holds gradients.
ROUND = {b"sums", b"buffered", b"inline", b"workers"}


def leftovers(client):
    """Returns a line for each leaked key. `client` replies in bytes.

    The owner of a key is the entry that names it. A part belongs to the entry of its gradient, that entry to a round, a
    taken round to the entry of its token, and all of them to the record of an existing accumulator.
    """
    found = []
    names = set()
    keys = sorted(client.scan_iter(count=1000))
    for key in keys:
        if key == b"redisacc:names":
            continue
        match = _KEY.fullmatch(key)
        if match is None:
            found.append(f"{key!r}: not a key of ours")
            continue
        name, what = match[1], match[2]
        if what in (None, b"parameters"):
            names.add(name)
        ttl = client.pttl(key)
        if ttl > {b"crew": CREW, b"parameters": BEGUN, b"parameters:deleted": DELETED}.get(what, LONGEST):
            found.append(f"{key!r}: stays for another {ttl} ms")
        record = b"redisacc:{" + name + b"}"
        if ttl == -1:
            reason = _unowned(client, record, what)
            if reason:
                found.append(f"{key!r}: no expiry, and {reason}")
        # All keys of a private accumulator have an expiry.
        elif (what or b"").startswith(b"part:") and client.ttl(record) == -1 and _counts(client, record, what):
            found.append(f"{key!r}: a round has its gradient, and it expires in {ttl} ms")
    if b"redisacc:names" in keys:
        orphans = client.smembers("redisacc:names") - names
        found += [f"redisacc:names: {name!r} has no record" for name in orphans]
    return found


def _counts(client, record, what):
    """Whether a part belongs to a gradient of a round that a taker may still read."""
    gradient = what.split(b":")[1]
    taken = [token for token, entry in client.hgetall(record + b":taken").items() if entry.startswith(b"granted")]
    rounds = [record + b":buffered", *[record + b":taken:" + token + b":buffered" for token in taken]]
    return any(client.hexists(buffered, gradient) for buffered in rounds)


def _unowned(client, record, what):
    """Returns why a key has no owner, or None if it has one."""
    if what is not None and what.startswith(b"partition:"):
        # It belongs to NAME, and is in its partition {NAME/p}.
        owner = record[:-1].rpartition(b"/")[0] + b"}"
        kind, _, rest = what.removeprefix(b"partition:").partition(b":")
        if kind == b"part":
            return _unowned_part_of_partition(client, owner, *rest.split(b":"))
        if kind == b"blob":
            return _unowned_blob(client, owner + b":parameters", rest.partition(b":")[0])
        return "nothing ever removes it"
    if what is not None and what.partition(b":")[0] == b"parameters":
        return _unowned_parameters(client, record + b":parameters", what)
    if client.type(record) != b"hash" or not client.hexists(record, "incarnation"):
        return "no record"
    if what is None or what in LASTING:
        return None
    if what in ROUND:
        return None if int(client.hget(record, "num_accumulated") or 0) else "the round is empty"
    key = record + b":attempts"
    if what == b"attempts":
        return (
            None if all(_is_under_way(client, key, attempt) for attempt in client.zrange(key, 0, -1)) else "it is over"
        )
    kind, _, rest = what.partition(b":")
    if kind == b"taken":
        token = rest.rpartition(b":")[0]
        return None if client.hexists(record + b":taken", token) else "no such round is listed"
    if kind == b"part":
        gradient, _, number = rest.rpartition(b":")
        for buffered in _rounds(client, record):
            entry = client.hget(buffered, gradient)
            if entry is not None and int(number) < _number_of_parts(entry):
                return None
        return "no round has its gradient"
    return "nothing ever removes it"


def _unowned_part_of_partition(client, record, attempt, number):
    if not client.hexists(record, "partitions"):
        return "no record of an accumulator with partitions"
    attempts = record + b":attempts"
    for listed in client.zrange(attempts, 0, -1):
        if listed.startswith(attempt + b" ") and _is_under_way(client, attempts, listed):
            return None
    for buffered in _rounds(client, record):
        entry = client.hget(buffered, attempt)
        if entry is not None and int(number) < _number_of_parts(entry):
            return None
    return "no round has its gradient"


def _is_under_way(client, attempts, attempt):
    """Whether an upload to partitions has a lease, and none that is longer than it should be."""
    # A test may have moved the clock.
    left = (client.zscore(attempts, attempt) or 0) / 1000 - clock.time()
    # A lease is longer by 8 seconds for each MiB, and no part has more than 2 of them.
    parts = sum(int(listed.split()[1]) for listed in client.zrange(attempts, 0, -1))
    return -1 < left <= LONGEST / 1000 + 30 + 17 * parts


def _unowned_parameters(client, record, what):
    if client.type(record) != b"hash" or client.hget(record, "incarnation").startswith(b"deleted:"):
        return "no record of parameters"
    if what == b"parameters":
        return None if client.hexists(record, "version") else "no version"
    key = record + b":attempts"
    if what == b"parameters:attempts":
        return None if all(_is_under_way(client, key, blob) for blob in client.zrange(key, 0, -1)) else "it is over"
    if what == b"parameters:history":
        return None if client.hexists(record, "history_latest") else "the record knows no latest step"
    _, kind, blob, _number = what.split(b":")
    if kind != b"object":
        return "nothing ever removes it"
    return None if blob in _published(client, record) else "the record does not list it"


def _unowned_blob(client, record, blob):
    if not client.hexists(record, "partitions"):
        return "no record of parameters with partitions"
    attempts = record + b":attempts"
    for listed in client.zrange(attempts, 0, -1):
        if listed.startswith(blob + b" ") and _is_under_way(client, attempts, listed):
            return None
    return None if blob in _published(client, record) else "the record does not list it, nor does an attempt"


def _published(client, record):
    """Returns the ids of the blobs of the version that is published, and of the mean gradients that are kept."""
    kept = ["retired"] if b'"name":"mean"' in (client.hget(record, "optimizer") or b"") else []
    listed = b" ".join(filter(None, client.hmget(record, "full", "rows", "state", "slots", *kept)))
    return {entry.partition(b":")[0] for entry in listed.split()}


def _number_of_parts(entry):
    """Returns how many parts the entry of a gradient lists."""
    try:
        return len(msgpack.unpackb(entry.partition(b" ")[2])["parts"])
    except (msgpack.UnpackException, ValueError, TypeError, KeyError):
        return 0


def _rounds(client, record):
    yield record + b":buffered"
    for token in client.hkeys(record + b":taken"):
        yield record + b":taken:" + token + b":buffered"


def written(client):
    """Returns the parts of gradients that no round has, and their places: in one slot, these have an expiry."""
    keys = [key for key in client.scan_iter() if re.search(rb":part:|:place:", key)]
    return [key for key in keys if client.pttl(key) >= 0]


def remaining(client):
    """Returns all keys but the marks of deletions, which expire after days."""
    return [key for key in client.scan_iter() if not key.endswith(b":parameters:deleted")]
