"""What the demo's processes tell each other through Redis beside the gradients themselves.

Gradients go through accumulators. The rest needs few keys, all made here; NONCE is a random name that each
chief draws, so that what belongs to an earlier run of the same name is never mistaken for this one's:

=====================================  ========  ==========================================================
key                                    type      holds
=====================================  ========  ==========================================================
``redisacc-demo:RUN``                  string    JSON: nonce, host and process of the chief; a lease of 20 s
``redisacc-demo:RUN:NONCE:settings``   string    JSON: what is trained, the digest of the text; 20 s
``redisacc-demo:RUN:NONCE:updates``    stream    entry STEP+1: the rows that the step changed; 20 s
``redisacc-demo:RUN:NONCE:worker:I``   string    JSON: host and process of worker I; a lease of 20 s
``redisacc-demo:RUN:NONCE:finished``   hash      worker's number → digest of its parameters; 20 s
=====================================  ========  ==========================================================

Everybody starts from the same parameters (they follow from the seed), so only changed rows travel: the chief
sends the new values, not the averaged gradients, and a worker's copy is the chief's bit for bit without
keeping the optimiser's state. The stream is short: a chief starts no step before each worker has applied a
gradient for it, so nobody is ever more than one entry behind.

Each key has an expiry that its owner renews; a process that is killed leaves nothing for longer than 20
seconds.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import redis

from redisacc.demo import DemoError
from redisacc.demo.skipgram import Array, Parameters
from redisacc.demo.text import IntArray

logger = logging.getLogger("redisacc.demo")

LEASE = 20  # seconds
_RENEW = 4.0  # seconds between renewals: several may fail before a lease runs out
_POLL = 0.25  # seconds
_KEPT_UPDATES = 4
_VERSION = 1


@dataclass(frozen=True)
class Settings:
    """What a run trains: all that a worker needs to compute the same batches and shapes as the chief.

    ``words`` is the size of the vocabulary found in the text, ``vocabulary`` the largest size allowed,
    ``batch`` the words of text for each worker and step, ``digest`` the corpus's. The ranges are checked at
    construction, because a worker reads them from Redis: ValueError.
    """

    workers: int
    steps: int
    words: int
    vocabulary: int
    dim: int
    window: int
    negatives: int
    shared_negatives: int
    batch: int
    seed: int
    subsampling: float
    rate: float
    digest: str

    def __post_init__(self) -> None:
        limits = {
            "workers": 1024,
            "steps": 2**40,
            "words": 2**24,
            "vocabulary": 2**24,
            "dim": 2**16,
            "window": 64,
            "negatives": 1024,
            "shared_negatives": 2**16,
            "batch": 2**24,
        }
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value).__name__ != field.type:
                raise ValueError(f"{field.name} isn't of type {field.type}")
            if field.name in limits and not 1 <= value <= limits[field.name]:
                raise ValueError(f"{field.name} isn't between 1 and {limits[field.name]}")
        if not 0 <= self.seed < 2**63:
            raise ValueError("seed isn't between 0 and 2**63 - 1")
        if not (0 < self.subsampling < float("inf") and 0 < self.rate < float("inf")):
            raise ValueError("subsampling and rate must be positive")

    def to_json(self) -> str:
        """The settings as JSON."""
        return json.dumps({"version": _VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, text: bytes) -> Settings:
        """The settings that ``to_json`` wrote. Raises DemoError for anything else."""
        found = _read_json(text, "the chief's settings")
        if found.pop("version", None) != _VERSION:
            raise DemoError("the chief runs another version of redisacc: its settings can't be read here")
        try:
            return cls(**found)
        except (TypeError, ValueError) as error:
            raise DemoError(f"the chief's settings can't be used: {error}") from None


@dataclass(frozen=True)
class Update:
    """The rows that a step changed, with their new values (float32); ``position`` is there whole."""

    input: tuple[IntArray, Array]
    output: tuple[IntArray, Array]
    position: Array

    @classmethod
    def of(cls, parameters: Parameters, input_indices: IntArray, output_indices: IntArray) -> Update:
        """The present values of the rows with these indices."""
        return cls(
            (input_indices, parameters.input[input_indices]),
            (output_indices, parameters.output[output_indices]),
            parameters.position.copy(),
        )

    def write_to(self, parameters: Parameters) -> None:
        """Put the rows into a copy of the parameters."""
        parameters.input[self.input[0]] = self.input[1]
        parameters.output[self.output[0]] = self.output[1]
        parameters.position[:] = self.position

    def encode(self) -> dict[bytes, bytes]:
        """The fields of a stream entry: indices as int32, values as float32, little-endian, row by row."""
        return {
            b"input_indices": self.input[0].astype("<i4").tobytes(),
            b"input": self.input[1].astype("<f4").tobytes(),
            b"output_indices": self.output[0].astype("<i4").tobytes(),
            b"output": self.output[1].astype("<f4").tobytes(),
            b"position": self.position.astype("<f4").tobytes(),
        }

    @classmethod
    def decode(cls, entry: dict[bytes, bytes], settings: Settings) -> Update:
        """The update that ``encode`` wrote. DemoError unless every length and index fits the settings."""
        rows = {}
        for name in ("input", "output"):
            indices = np.frombuffer(_whole(entry, f"{name}_indices", 4), "<i4").astype(np.int64)
            if len(indices) and not (
                indices[0] >= 0 and indices[-1] < settings.words and bool((np.diff(indices) > 0).all())
            ):
                raise DemoError(f"an update in Redis has wrong row numbers for {name}")
            rows[name] = indices, _floats(entry, name, (len(indices), settings.dim))
        return cls(rows["input"], rows["output"], _floats(entry, "position", (2 * settings.window, settings.dim)))


def _whole(entry: dict[bytes, bytes], name: str, size: int) -> bytes:
    data = entry.get(name.encode())
    if data is None or len(data) % size:
        raise DemoError(f"an update in Redis has no usable {name}")
    return data


def _floats(entry: dict[bytes, bytes], name: str, shape: tuple[int, int]) -> Array:
    data = _whole(entry, name, 4)
    if len(data) != 4 * shape[0] * shape[1]:
        raise DemoError(f"an update in Redis has {len(data)} bytes of {name} where {4 * shape[0] * shape[1]} belong")
    return np.frombuffer(data, "<f4").astype(np.float32).reshape(shape)


def parameters_digest(parameters: Parameters) -> str:
    """Equal for parameters that are equal bit for bit."""
    digest = hashlib.sha256()
    for array in (parameters.input, parameters.output, parameters.position):
        digest.update(array.astype("<f4").tobytes())
    return digest.hexdigest()


def _read_json(text: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise DemoError(f"{what} in Redis can't be read")
    return found


class _Keys:
    def __init__(self, run: str, nonce: str) -> None:
        self.chief = f"redisacc-demo:{run}"
        self.settings = f"{self.chief}:{nonce}:settings"
        self.updates = f"{self.chief}:{nonce}:updates"
        self.finished = f"{self.chief}:{nonce}:finished"
        self._worker = f"{self.chief}:{nonce}:worker:"

    def worker(self, index: int) -> str:
        return f"{self._worker}{index}"


def _card(**more: str) -> bytes:
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), **more}).encode()


def _owner(card: bytes) -> str:
    found = _read_json(card, "a lease")
    return f"{found.get('host')}, process {found.get('pid')}"


class ChiefExchange:
    """The chief's side: holds the run's name, says what is trained, sends the updates, sees who is there."""

    def __init__(self, client: redis.Redis, run: str) -> None:
        # redis-py types its replies differently in each version.
        self._client: Any = client
        self._run = run
        self._nonce = secrets.token_hex(8)
        self._keys = _Keys(run, self._nonce)
        self._card = _card(nonce=self._nonce)
        self._settings: Settings | None = None
        self._renewed = 0.0

    def claim(self) -> None:
        """Take the run's name. Waits for the lease of a chief that died; DemoError when that one is alive."""
        deadline = time.monotonic() + LEASE + 2
        said = False
        while not self._client.set(self._keys.chief, self._card, nx=True, ex=LEASE):
            other = self._client.get(self._keys.chief)
            if other == self._card:
                break  # redis-py sent the SET twice, over a connection that broke in between
            if other is not None:
                if time.monotonic() > deadline:
                    raise DemoError(
                        f"run {self._run!r} has a chief already ({_owner(other)}); choose another name with --run"
                    )
                if not said:
                    logger.info("run %s has a chief already (%s); is it alive?", self._run, _owner(other))
                    said = True
            time.sleep(_POLL)
        self._renewed = time.monotonic()

    def announce(self, settings: Settings) -> None:
        """Tell the workers what is trained. They may apply gradients from here on."""
        self._settings = settings
        self._client.set(self._keys.settings, settings.to_json(), ex=LEASE)

    def renew(self) -> None:
        """Say that the chief is alive; to be called every few seconds. DemoError if it was replaced."""
        if time.monotonic() - self._renewed < _RENEW:
            return
        if self._client.get(self._keys.chief) != self._card and not self._client.set(
            self._keys.chief, self._card, nx=True, ex=LEASE
        ):
            raise DemoError(f"this chief was stopped for so long that another took over run {self._run!r}")
        pipe = self._client.pipeline(transaction=False)
        for key in (self._keys.chief, self._keys.settings, self._keys.updates, self._keys.finished):
            pipe.expire(key, LEASE)
        pipe.execute()
        self._renewed = time.monotonic()

    def workers(self) -> dict[int, str]:
        """The workers that hold a lease: number → host and process."""
        assert self._settings is not None
        cards = self._client.mget([self._keys.worker(i) for i in range(self._settings.workers)])
        return {index: _owner(card) for index, card in enumerate(cards) if card is not None}

    def publish(self, step: int, update: Update) -> None:
        """Send the rows that ``step`` changed; the workers begin the next step when they have them."""
        pipe = self._client.pipeline(transaction=False)
        pipe.xadd(
            self._keys.updates,
            update.encode(),
            id=f"{step + 1}-0",
            maxlen=_KEPT_UPDATES,
            approximate=False,
        )
        pipe.expire(self._keys.updates, LEASE)
        added, _ = pipe.execute(raise_on_error=False)
        # redis-py sends the pipeline again after a lost connection. Nobody else writes to this stream, so an
        # entry with this number is the one that was sent first.
        if isinstance(added, redis.ResponseError) and "equal or smaller" in str(added):
            return
        if isinstance(added, Exception):
            raise added

    def finished(self) -> dict[int, str]:
        """The digests of the parameters of those workers that are through."""
        found = self._client.hgetall(self._keys.finished)
        try:
            return {int(index): digest.decode("ascii") for index, digest in found.items()}
        except ValueError:
            raise DemoError("what the workers reported at their end can't be read") from None

    def close(self) -> None:
        """Delete every key of this run and give up its name."""
        keys = [self._keys.settings, self._keys.updates, self._keys.finished]
        if self._settings is not None:
            keys += [self._keys.worker(index) for index in range(self._settings.workers)]
        # The name goes last and only if it is still ours: who sees it free must find nothing else left.
        self._client.delete(*keys)
        if self._client.get(self._keys.chief) == self._card:
            self._client.delete(self._keys.chief)


class WorkerExchange:
    """A worker's side: finds the chief, takes a number, receives updates, notices when the chief is gone."""

    def __init__(self, client: redis.Redis, run: str) -> None:
        self._client: Any = client
        self._run = run
        self._card = _card()
        self._nonce = ""
        self._keys = _Keys(run, "")
        self._index: int | None = None
        self._renewed = 0.0

    def find_chief(self, timeout: float) -> Settings:
        """Wait until a chief says what it trains. DemoError after ``timeout`` seconds without one."""
        deadline = time.monotonic() + timeout
        said = False
        while True:
            card = self._client.get(self._keys.chief)
            if card is not None:
                nonce = _read_json(card, "the chief's lease").get("nonce")
                if not isinstance(nonce, str) or not nonce.isalnum():
                    raise DemoError("the chief's lease in Redis can't be read")
                text = self._client.get(_Keys(self._run, nonce).settings)
                if text is not None:
                    self._nonce, self._keys = nonce, _Keys(self._run, nonce)
                    return Settings.from_json(text)
            if time.monotonic() > deadline:
                raise DemoError(f"no chief came for run {self._run!r} within {timeout:g} seconds")
            if not said:
                logger.info("waiting for the chief of run %s", self._run)
                said = True
            time.sleep(_POLL)

    def claim(self, index: int | None, settings: Settings) -> int:
        """Take the number ``index``, or the lowest that is free. Returns it; DemoError when it is taken."""
        if index is not None and not 0 <= index < settings.workers:
            raise DemoError(f"this run has workers 0 to {settings.workers - 1}, there is no place for worker {index}")
        for candidate in range(settings.workers) if index is None else [index]:
            if self._client.set(self._keys.worker(candidate), self._card, nx=True, ex=LEASE):
                self._index = candidate
                self._renewed = time.monotonic()
                return candidate
        if index is None:
            raise DemoError(f"run {self._run!r} has all of its {settings.workers} workers already")
        raise DemoError(f"run {self._run!r} has a worker {index} already")

    def renew(self) -> None:
        """Say that this worker is alive; to be called every few seconds.

        DemoError when its lease ran out: the chief has counted it as gone, and another may have its number.
        """
        if self._index is None or time.monotonic() - self._renewed < _RENEW:
            return
        key = self._keys.worker(self._index)
        # XX: a key that the chief has deleted in the meantime must not come back.
        if self._client.get(key) != self._card or not self._client.set(key, self._card, xx=True, ex=LEASE):
            self.check_chief()
            raise DemoError("this worker was stopped for so long that its lease ran out")
        self._renewed = time.monotonic()

    def check_chief(self) -> None:
        """DemoError unless the chief of this run is alive and still the same one."""
        card = self._client.get(self._keys.chief)
        if card is None:
            raise DemoError(f"the chief of run {self._run!r} is gone")
        if _read_json(card, "the chief's lease").get("nonce") != self._nonce:
            raise DemoError(f"run {self._run!r} has another chief now")

    def nobody_is_chief(self) -> bool:
        """Whether the run's name is free: then nobody but a worker can clean up after the chief."""
        return not self._client.exists(self._keys.chief)

    def next_update(self, step: int, settings: Settings, idle: Callable[[], None] = lambda: None) -> Update:
        """Wait for the rows that ``step`` changed. Blocks as long as the chief is alive; DemoError when it is
        gone.

        ``idle`` is called about once a second meanwhile.
        """
        while True:
            # A block longer than the client's socket timeout would look like a lost connection.
            reply = self._client.xread({self._keys.updates: f"{step}-0"}, count=1, block=1000)
            entries = reply.get(self._keys.updates.encode(), []) if isinstance(reply, dict) else reply
            if entries:
                # RESP2 gives [[key, [entry]]], RESP3 {key: [[entry]]}.
                ((number, entry),) = entries[0] if isinstance(reply, dict) else entries[0][1]
                if number != f"{step + 1}-0".encode():
                    raise DemoError(f"step {step} of run {self._run!r} is over: a worker can't join a run under way")
                return Update.decode(entry, settings)
            self.check_chief()
            self.renew()
            idle()

    def finish(self, digest: str) -> None:
        """Tell the chief that this worker has the last step's result, with the digest of its parameters."""
        pipe = self._client.pipeline(transaction=True)
        pipe.hset(self._keys.finished, str(self._index), digest)
        pipe.expire(self._keys.finished, LEASE)
        pipe.execute()

    def close(self) -> None:
        """Give up this worker's number."""
        if self._index is None:
            return
        key = self._keys.worker(self._index)
        if self._client.get(key) == self._card:
            self._client.delete(key)
        self._index = None
