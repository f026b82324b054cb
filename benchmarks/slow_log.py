"""Collects how long scripts held the server, from its slow log and its latency histogram.

The server measures wall time. If more processes want to run than there are cores, the operating system suspends the
server in the middle of a call, and the call looks long. The longest call of a script that only counts shows the size of
this effect.
"""

from __future__ import annotations

import contextlib
import textwrap
from typing import Any

import redis

NOTHING = "return 1"
# Takes about as long as a script of redisacc, because longer calls are more likely to be interrupted.
COUNTING = "local sum = 0 for i = 1, 12000 do sum = sum + i end return sum"


# The slow log keeps the first 128 bytes of an argument.
_NAME_BYTES = 100


def first_words(body: str) -> str:
    """Returns a script's name in the report, which is the beginning of the first sentence of its head."""
    if body in (NOTHING, COUNTING):
        return "(does nothing)" if body == NOTHING else "(counts to 12,000)"
    for line in body.splitlines():
        if line.startswith("-- ") and not line.startswith("-- #"):
            sentence = line[3:].partition(". ")[0].rstrip(".")
            return textwrap.shorten(sentence, _NAME_BYTES, placeholder=" …")
    return "(of the benchmark's own)"


def _body(client: redis.Redis, sha: str) -> str:
    with contextlib.suppress(redis.RedisError):
        # Valkey 8 and newer.
        body = client.execute_command("SCRIPT", "SHOW", sha)
        return body.decode() if isinstance(body, bytes) else str(body)
    return f"-- {sha[:12]}"


def collect(client: redis.Redis) -> dict[str, Any]:
    """Returns, for each script, the calls above 0.2, 0.25 and 0.5 ms and the longest; and the histogram."""
    # A connection of its own, because redis-py would transform the reply.
    connection = client.connection_pool.make_connection()
    connection.send_command("SLOWLOG", "GET", -1)
    entries = connection.read_response(disable_decoding=True)
    connection.disconnect()
    slow: dict[str, list[int]] = {}
    others: dict[str, int] = {}
    names: dict[str, str] = {}
    for _, _, duration, words, *_ in entries:
        command, *arguments = (word.decode(errors="replace") for word in words)
        if command.upper() in ("EVALSHA", "EVAL"):
            code = arguments[0]
            if code not in names:
                names[code] = first_words(_body(client, code) if command.upper() == "EVALSHA" else code)
            slow.setdefault(names[code], []).append(duration)
        else:
            others[command.upper()] = max(others.get(command.upper(), 0), duration)
    stats = client.info("commandstats").get("cmdstat_evalsha", {})
    histogram: dict[str, Any] = {}
    with contextlib.suppress(redis.RedisError):
        # Redis 7 and newer.
        histogram = _text(client.execute_command("LATENCY", "HISTOGRAM", "evalsha"))
    return {
        "version": _version(client),
        "evalsha_calls": stats.get("calls", 0),
        "evalsha_mean_us": stats.get("usec_per_call"),
        "scripts": [
            {
                "name": name,
                "above_200us": len(times),
                "above_250us": sum(time > 250 for time in times),
                "above_500us": sum(time > 500 for time in times),
                "longest_us": max(times),
            }
            for name, times in sorted(slow.items(), key=lambda item: -max(item[1]))
        ],
        "other_commands_longest_us": dict(sorted(others.items(), key=lambda item: -item[1])),
        "histogram": histogram,
    }


def _version(client: redis.Redis) -> str:
    info = client.info("server")
    if info.get("valkey_version"):
        return f"Valkey {info['valkey_version']}"
    return f"Redis {info['redis_version']}"


def _text(value: Any) -> Any:
    """Converts a nested reply for JSON; flat lists of names and values become objects."""
    match value:
        case bytes():
            return value.decode(errors="replace")
        case dict():
            return {str(_text(key)): _text(one) for key, one in value.items()}
        case [bytes(), *_] if len(value) % 2 == 0:
            return {_text(value[k]): _text(value[k + 1]) for k in range(0, len(value), 2)}
        case list():
            if value and len(value) % 2 == 0 and all(isinstance(one, int) for one in value):
                return {str(value[k]): value[k + 1] for k in range(0, len(value), 2)}
            return [_text(one) for one in value]
    return value
