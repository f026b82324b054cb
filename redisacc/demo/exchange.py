"""What the demo's processes exchange through Redis beside the gradients.

Gradients go through accumulators. The rest needs five kinds of keys, all made here. NONCE is a random name that each
chief draws, so that a key of an earlier run with the same name is never mistaken for one of this run:

=====================================  ========  ==========================================================
key                                    type      holds
=====================================  ========  ==========================================================
``redisacc-demo:RUN``                  string    JSON: nonce, host and process of the chief; a lease of 20 s
``redisacc-demo:RUN:NONCE:settings``   string    JSON: what is trained, the digest of the text; 20 s
``redisacc-demo:RUN:NONCE:updates``    stream    entry STEP+1: the rows that the step changed; 20 s
``redisacc-demo:RUN:NONCE:worker:I``   string    JSON: host and process of worker I; a lease of 20 s
``redisacc-demo:RUN:NONCE:finished``   hash      worker's number → digest of its parameters; 20 s
=====================================  ========  ==========================================================

All processes start from the same parameters, which follow from the seed, so only changed rows travel. The chief sends
the new values rather than the averaged gradients, so a worker's copy equals the chief's bit for bit, without the
optimiser's state. The stream is short: the chief finishes no step before each worker has applied a gradient for it, so
no worker is ever more than one entry behind.

Each key has an expiry that its owner renews, so a killed process leaves nothing for longer than 20 seconds.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import redis

from redisacc.demo import DemoError
from redisacc.demo.skipgram import Array, Parameters
from redisacc.demo.text import IntArray

logger = logging.getLogger("redisacc.demo")

LEASE = 20  # seconds
# Seconds between renewals: several may fail before a lease expires.
_RENEW = 4.0
# Seconds after the end of a lease until which a chief waits for it.
_CLAIM_MARGIN = 2.0
_POLL = 0.25  # seconds
# Milliseconds for which a worker waits for an update before it looks for the chief. A wait longer than the client's
# socket timeout would look like a lost connection.
_BLOCK = 1000
_KEPT_UPDATES = 4
_VERSION = 1


@dataclass(frozen=True)
class Settings:
    """What a run trains: all that a worker needs to compute the same batches and shapes as the chief.

    The ranges are checked at construction, because a worker reads the values from Redis.

    Attributes:
        workers: number of workers.
        steps: number of steps.
        words: size of the vocabulary that was found in the text.
        vocabulary: maximum size of the vocabulary.
        dim: length of a word vector.
        window: number of context words on either side of a word.
        negatives: number of negative samples per pair.
        shared_negatives: number of negatives that all pairs of a batch share.
        batch: words of text per worker and step.
        seed: seed of all random numbers.
        subsampling: share of the text above which a word is thinned out.
        rate: learning rate.
        digest: digest of the corpus.

    Raises:
        ValueError: a value has the wrong type or is out of range.
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
                raise ValueError(f"{field.name} must be of type {field.type}, not {value!r:.100}")
            if field.name in limits and not 1 <= value <= limits[field.name]:
                raise ValueError(f"{field.name} must be between 1 and {limits[field.name]}, not {value}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be between 0 and 2**63 - 1, not {self.seed}")
        if not (0 < self.subsampling < float("inf") and 0 < self.rate < float("inf")):
            raise ValueError(f"subsampling and rate must be positive, not {self.subsampling} and {self.rate}")

    def to_json(self) -> str:
        """Returns the settings as JSON."""
        return json.dumps({"version": _VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, text: bytes) -> Settings:
        """Returns the settings that ``to_json`` wrote.

        Raises:
            DemoError: the text is anything else.
        """
        found = _read_json(text, "the chief's settings")
        if found.pop("version", None) != _VERSION:
            raise DemoError("the chief runs another version of redisacc, whose settings this version cannot read")
        try:
            return cls(**found)
        except (TypeError, ValueError) as error:
            raise DemoError(f"the chief's settings are invalid: {error}") from None


@dataclass(frozen=True)
class Update:
    """The rows that a step changed.

    Attributes:
        input: (row indices, new float32 values) of the input vectors.
        output: the same of the output vectors.
        position: all float32 values of the places.
    """

    input: tuple[IntArray, Array]
    output: tuple[IntArray, Array]
    position: Array

    @classmethod
    def of(cls, parameters: Parameters, input_indices: IntArray, output_indices: IntArray) -> Update:
        """Returns an update with the present values of the rows with these indices."""
        return cls(
            (input_indices, parameters.input[input_indices]),
            (output_indices, parameters.output[output_indices]),
            parameters.position.copy(),
        )

    def write_to(self, parameters: Parameters) -> None:
        """Writes the rows into a copy of the parameters."""
        parameters.input[self.input[0]] = self.input[1]
        parameters.output[self.output[0]] = self.output[1]
        parameters.position[:] = self.position

    def encode(self) -> dict[bytes, bytes]:
        """Returns the fields of a stream entry: indices as int32, values as float32, little-endian, row by row."""
        return {
            b"input_indices": self.input[0].astype("<i4").tobytes(),
            b"input": self.input[1].astype("<f4").tobytes(),
            b"output_indices": self.output[0].astype("<i4").tobytes(),
            b"output": self.output[1].astype("<f4").tobytes(),
            b"position": self.position.astype("<f4").tobytes(),
        }

    @classmethod
    def decode(cls, entry: dict[bytes, bytes], settings: Settings) -> Update:
        """Returns the update that ``encode`` wrote.

        Raises:
            DemoError: a length or an index does not fit the settings.
        """
        rows = {}
        for name in ("input", "output"):
            indices = np.frombuffer(_whole(entry, f"{name}_indices", 4), "<i4").astype(np.int64)
            if len(indices) and not (
                indices[0] >= 0 and indices[-1] < settings.words and bool((np.diff(indices) > 0).all())
            ):
                raise DemoError(f"an update in Redis has invalid row numbers of {name}")
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
        raise DemoError(f"an update in Redis has {len(data)} bytes of {name} instead of {4 * shape[0] * shape[1]}")
    return np.frombuffer(data, "<f4").astype(np.float32).reshape(shape)


def parameters_digest(parameters: Parameters) -> str:
    """Returns a digest that is equal exactly for parameters that are equal bit for bit."""
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
        raise DemoError(f"{what} in Redis cannot be read")
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
    """The chief's side: holds the name of the run, announces the settings, sends updates, lists the workers."""

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
        """Claims the name of the run. Blocks until the lease of a dead chief expires, at most ``LEASE`` + 2 seconds.

        Raises:
            DemoError: another chief holds the name and is alive.
        """
        deadline = time.monotonic() + LEASE + _CLAIM_MARGIN
        logged = False
        while not self._client.set(self._keys.chief, self._card, nx=True, ex=LEASE):
            other = self._client.get(self._keys.chief)
            if other == self._card:
                break  # redis-py sent the SET twice, over a connection that broke in between
            if other is not None:
                if time.monotonic() > deadline:
                    raise DemoError(
                        f"run {self._run!r} already has a chief ({_owner(other)}); choose another name with --run"
                    )
                if not logged:
                    logger.info("run %s already has a chief (%s); waiting for its lease", self._run, _owner(other))
                    logged = True
            time.sleep(_POLL)
        self._renewed = time.monotonic()

    def announce(self, settings: Settings) -> None:
        """Publishes the settings. Workers may apply gradients from then on."""
        self._settings = settings
        self._client.set(self._keys.settings, settings.to_json(), ex=LEASE)

    def renew(self) -> None:
        """Renews the leases of the chief's keys, at most every 4 seconds; to be called every few seconds.

        Raises:
            DemoError: another chief has taken over the run.
        """
        if time.monotonic() - self._renewed < _RENEW:
            return
        if self._client.get(self._keys.chief) != self._card and not self._client.set(
            self._keys.chief, self._card, nx=True, ex=LEASE
        ):
            raise DemoError(
                f"another chief took over run {self._run!r}: this one was stopped for longer than {LEASE} seconds"
            )
        pipe = self._client.pipeline(transaction=False)
        for key in (self._keys.chief, self._keys.settings, self._keys.updates, self._keys.finished):
            pipe.expire(key, LEASE)
        pipe.execute()
        self._renewed = time.monotonic()

    def workers(self) -> dict[int, str]:
        """Returns the workers that hold a lease: number → host and process."""
        assert self._settings is not None
        cards = self._client.mget([self._keys.worker(i) for i in range(self._settings.workers)])
        return {index: _owner(card) for index, card in enumerate(cards) if card is not None}

    def publish(self, step: int, update: Update) -> None:
        """Sends the rows that ``step`` changed. The workers then begin the next step."""
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
        # redis-py sends the pipeline again after a lost connection. No other process writes to this stream, so an entry
        # with this number is the one that was sent first.
        if isinstance(added, redis.ResponseError) and "equal or smaller" in str(added):
            return
        if isinstance(added, Exception):
            raise added

    def finished(self) -> dict[int, str]:
        """Returns the digests of the parameters of the workers that have finished: number → digest."""
        found = self._client.hgetall(self._keys.finished)
        try:
            return {int(index): digest.decode("ascii") for index, digest in found.items()}
        except ValueError:
            raise DemoError("the reports of the workers in Redis cannot be read") from None

    def close(self) -> None:
        """Deletes every key of this run and gives up its name."""
        keys = [self._keys.settings, self._keys.updates, self._keys.finished]
        if self._settings is not None:
            keys += [self._keys.worker(index) for index in range(self._settings.workers)]
        # The name goes last: once it is free, another chief must find no other key.
        self._client.delete(*keys)
        if self._client.get(self._keys.chief) == self._card:
            self._client.delete(self._keys.chief)


class WorkerExchange:
    """A worker's side: finds the chief, claims a number, receives updates, notices when the chief is gone."""

    def __init__(self, client: redis.Redis, run: str) -> None:
        self._client: Any = client
        self._run = run
        self._card = _card()
        self._nonce = ""
        self._keys = _Keys(run, "")
        self._index: int | None = None
        self._renewed = 0.0

    def find_chief(self, timeout: float) -> Settings:
        """Blocks until a chief announces its settings, and returns them.

        Raises:
            DemoError: there was none within ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        logged = False
        while True:
            card = self._client.get(self._keys.chief)
            if card is not None:
                nonce = _read_json(card, "the chief's lease").get("nonce")
                if not isinstance(nonce, str) or not nonce.isalnum():
                    raise DemoError("the chief's lease in Redis cannot be read")
                text = self._client.get(_Keys(self._run, nonce).settings)
                if text is not None:
                    self._nonce, self._keys = nonce, _Keys(self._run, nonce)
                    return Settings.from_json(text)
            if time.monotonic() > deadline:
                raise DemoError(f"no chief appeared for run {self._run!r} within {timeout:g} seconds")
            if not logged:
                logger.info("waiting for the chief of run %s", self._run)
                logged = True
            time.sleep(_POLL)

    def claim(self, index: int | None, settings: Settings) -> int:
        """Claims the number ``index``, or the lowest free one, and returns it.

        Raises:
            DemoError: the number, or every number, is in use, or the run has no such number.
        """
        if index is not None and not 0 <= index < settings.workers:
            raise DemoError(
                f"there is no worker {index} in run {self._run!r}, which has workers 0 to {settings.workers - 1}"
            )
        for candidate in range(settings.workers) if index is None else [index]:
            if self._client.set(self._keys.worker(candidate), self._card, nx=True, ex=LEASE):
                self._index = candidate
                self._renewed = time.monotonic()
                return candidate
        if index is None:
            raise DemoError(f"run {self._run!r} already has all of its {settings.workers} workers")
        raise DemoError(f"run {self._run!r} already has a worker {index}")

    def renew(self) -> None:
        """Renews this worker's lease, at most every 4 seconds; to be called every few seconds.

        Raises:
            DemoError: the lease has expired. The chief counts this worker as gone, and another may have its number.
        """
        if self._index is None or time.monotonic() - self._renewed < _RENEW:
            return
        key = self._keys.worker(self._index)
        # XX: a key that the chief has deleted since the GET must not come back.
        if self._client.get(key) != self._card or not self._client.set(key, self._card, xx=True, ex=LEASE):
            self.check_chief()
            raise DemoError(f"the lease of this worker expired, because it was stopped for longer than {LEASE} seconds")
        self._renewed = time.monotonic()

    def check_chief(self) -> None:
        """Checks that the chief of this run is alive and still the same one.

        Raises:
            DemoError: it is not.
        """
        card = self._client.get(self._keys.chief)
        if card is None:
            raise DemoError(f"the chief of run {self._run!r} is gone")
        if _read_json(card, "the chief's lease").get("nonce") != self._nonce:
            raise DemoError(f"run {self._run!r} has another chief now")

    def nobody_is_chief(self) -> bool:
        """Returns whether the name of the run is free. Then only a worker can clean up after the chief."""
        return not self._client.exists(self._keys.chief)

    def next_update(self, step: int, settings: Settings) -> Update:
        """Blocks until the chief sends the rows that ``step`` changed, and returns them.

        Raises:
            DemoError: the chief is gone, or has already finished a later step.
        """
        while True:
            reply = self._client.xread({self._keys.updates: f"{step}-0"}, count=1, block=_BLOCK)
            entries = reply.get(self._keys.updates.encode(), []) if isinstance(reply, dict) else reply
            if entries:
                # RESP2 gives [[key, [entry]]], RESP3 {key: [[entry]]}.
                ((number, entry),) = entries[0] if isinstance(reply, dict) else entries[0][1]
                if number != f"{step + 1}-0".encode():
                    raise DemoError(
                        f"step {step} of run {self._run!r} is over; a worker cannot join after the first step"
                    )
                return Update.decode(entry, settings)
            self.check_chief()
            self.renew()

    def finish(self, digest: str) -> None:
        """Reports to the chief that this worker has the result of the last step, with the digest of its parameters."""
        pipe = self._client.pipeline(transaction=True)
        pipe.hset(self._keys.finished, str(self._index), digest)
        pipe.expire(self._keys.finished, LEASE)
        pipe.execute()

    def close(self) -> None:
        """Gives up this worker's number."""
        if self._index is None:
            return
        key = self._keys.worker(self._index)
        if self._client.get(key) == self._card:
            self._client.delete(key)
        self._index = None
