"""Publishes versions of parameters."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from redisacc._arrays.trees import flatten_arrays
from redisacc._arrays.validation import Array, indices
from redisacc._format.buffered import PartMissingError
from redisacc._format.keys import ParameterKeys, automatic_partitions, choose_partitions
from redisacc._format.leaves import Layout, Leaf, Schema, packed, ranges_text
from redisacc._format.parameter_record import (
    MAX_BLOB_BYTES,
    Blob,
    Manifest,
    ParameterRecord,
)
from redisacc._interrupts import interrupt_in
from redisacc._protocol.lifecycle.opening import list_name
from redisacc._protocol.parameters.marks import whereabouts
from redisacc._protocol.parameters.reader import OF_STATE, RETIRED, ParameterReader
from redisacc._protocol.parameters.upload_plan import brought_leaves, plan_leaves, retire
from redisacc._protocol.parameters.version_writer import Follows, Tries, Version, VersionWriter
from redisacc._protocol.rounds.granted_rounds import EndedRound, still_listed
from redisacc._protocol.scripts import OF_PARAMETERS, Reply, Scripts, refused
from redisacc._text import seconds_text, shown
from redisacc._wire.transport import Transport
from redisacc.errors import ConflictError, DataLossError, InvalidArgumentError, NotFoundError

logger = logging.getLogger("redisacc")


@dataclass(frozen=True)
class Wanted:
    """A version that a caller wants to publish, checked.

    Attributes:
        tree: the tree, as it was given.
        schema: the schema of its leaves.
        arrays: the leaves.
        step: the step.
        changed: leaf → indices of the rows that differ from the version before, ascending.
        state: the publisher's state: its schema and its leaves; None if there is none.
        finished: whether it is the last version.
        round: the round that it follows from, which ends in the same instant; None means it follows from none.
        kept: what the program keeps from now on, as text; None means the same as before.
    """

    tree: object
    schema: Schema
    arrays: Sequence[Array]
    step: int
    changed: Mapping[int, Array]
    state: tuple[Schema, Sequence[Array]] | None
    finished: bool
    round: EndedRound | None = None
    kept: str | None = None


@dataclass(frozen=True)
class _Published:
    """The version that is published, as far as this process knows."""

    version: str
    step: int
    manifest: Manifest
    encoding: str


class Publisher:
    """Publishes the parameters of one name. Threads may share it.

    Args:
        transport: the way to the server.
        keys: the keys of the parameters.
        reader: reads them for the same handle.
        encoding: how elements of float32 are stored, one of ENCODINGS.
        partitions: among how many slots the parts of blobs are spread; "auto": as many as there are masters, if the
            values are large enough; None means as with existing parameters, and 1 for new ones.
        min_replicas: how many replicas have to confirm a version; 0: none are asked.
    """

    def __init__(
        self,
        transport: Transport,
        keys: ParameterKeys,
        reader: ParameterReader,
        encoding: str,
        partitions: int | Literal["auto"] | None,
        *,
        min_replicas: int = 0,
    ) -> None:
        self._transport = transport
        self._min_replicas = min_replicas
        self._keys = keys
        self._reader = reader
        self._encoding = encoding
        self._partitions = partitions
        self._scripts = Scripts(transport, keys, OF_PARAMETERS)
        self._lock = transport.waits.lock()
        self._schema: Schema | None = None
        self._last: _Published | None = None
        self._listed = False
        # Whether a part of the version that is published is lost, so that the next one needs all leaves whole.
        self._has_losses = False
        # The version to which ``changed`` refers: the one that the caller has published, or got, last.
        self._callers = ""

    def note_caller_has(self, version: str) -> None:
        """Notes the version that the caller got."""
        self._callers = version

    def check(
        self,
        tree: object,
        step: int,
        changed: object,
        state: object,
        *,
        finished: bool = False,
        ended: EndedRound | None = None,
        kept: str | None = None,
    ) -> Wanted:
        """Checks the arguments of a caller, and returns the version to publish.

        Raises:
            InvalidArgumentError: an argument is invalid, or the tree is unlike the version that this handle published
                last.
        """
        known = self._schema
        schema, arrays = schema_of(tree, "tree") if known is None else (known, self._arrays_of(known, tree))
        rows = {} if changed is None else _checked_rows(schema, changed)
        given = None if state is None else schema_of(state, "state")
        self._reader.note_given("tree", schema.structure)
        if given is not None:
            self._reader.note_given("state", given[0].structure)
        return Wanted(tree, schema, arrays, step, rows, given, finished, ended, kept)

    def publish(self, wanted: Wanted, publisher: str, *, restores: bool = False) -> None:
        """Publishes a version.

        Args:
            wanted: the version.
            publisher: the name of the publisher.
            restores: whether to publish it also if the server has lost the parameters that this handle has seen. They
                keep their incarnation, so that other handles may continue to use them.

        Raises:
            NotFoundError: the parameters were deleted, or, with ``restores``, replaced by others.
            ConflictError: another taker has recovered the round.
        """
        with self._lock:
            if restores:
                self._last = None
            tries = Tries(self._transport, self._keys, wanted.step)
            while (reply := self._try(wanted, publisher, restores=restores)).outcome != "published":
                tries.pause(reply)
            if not self._listed:
                # By every publisher once, because the first one may have died just before.
                list_name(self._transport, self._keys.name)
                self._listed = True
            if self._min_replicas:
                self._confirm(wanted)
            if wanted.round is not None:
                # Only now, because a replica that takes over may still need what lies in other slots.
                wanted.round.clean_up()

    def _confirm(self, wanted: Wanted) -> None:
        """Raises NotReplicatedError unless replicas confirm in time what was published a moment ago."""
        blobs: Iterable[Blob] = ()
        keys = self._reader.keys
        if keys.partitions:
            record = self._reader.poll()
            if record is None or record.step != wanted.step:
                # A later version has replaced it. Its publisher waits for replicas that have that one.
                return
            blobs = record.stored(self._reader.schema())
        VersionWriter(self._transport, keys, self._min_replicas).confirm(self._reader.incarnation, wanted.step, blobs)

    def check_agrees(self, tree: object, state: object) -> None:
        """Raises InvalidArgumentError unless a tree is like what is published."""
        wanted = self.check(tree, 0, None, state)
        if self._reader.poll() is not None:
            self._agreed(wanted)

    def finish(self, finished: bool) -> None:
        """Notes whether the version that is published is the last one."""
        self._scripts.amend(
            incarnation=self._reader.incarnation,
            event="finished" if finished else "continued",
            fields=["finished", "1" if finished else "0"],
        )

    def _try(self, wanted: Wanted, publisher: str, *, restores: bool) -> Reply:
        """Tries to publish a version. Its reply is "published", or why it is not: try again."""
        last, has_losses = self._last, self._has_losses
        self._has_losses = False
        if last is None or wanted.step <= last.step:
            # Unknown, or to be compared: somebody may have deleted it since, or published more.
            self._last = None
            record = self._poll(restores=restores)
            last = None
            if record is not None:
                self.check_partitions(record.keys)
                wanted = self._agreed(wanted)
                if wanted.step <= record.step:
                    try:
                        return Reply(outcome="published" if self._is_there(wanted, record) else "changed")
                    except DataLossError as error:
                        # Only the caller still has its values. They cannot be compared with what is gone.
                        logger.warning("%s: step %d is published again: %s", self._keys.name, wanted.step, error)
                        has_losses = True
                last = _Published(record.version, record.step, record.manifest(self._reader.schema()), record.encoding)
        if last is None:
            incarnation, keys = self._first(wanted, restores=restores)
        else:
            incarnation, keys = self._reader.incarnation, self._reader.keys
        previous = "" if last is None else last.version
        follows = Follows(incarnation, previous, wanted.step, has_losses)
        version, reply = VersionWriter(self._transport, keys).write(
            previous, lambda version: self._version(version, wanted, follows, last, publisher)
        )
        if reply.outcome == "published":
            self._reader.learn(incarnation, keys, wanted.schema)
            self._schema, self._callers = wanted.schema, version.id
            self._last = _Published(version.id, wanted.step, version.change.manifest, self._encoding)
            return reply
        self._last = None
        if reply.outcome == "unknown" and wanted.round is not None:
            # The server may have lost the round while the program computed. If the version follows, nobody has used it.
            with suppress(NotFoundError):
                still_listed(wanted.round.keys, wanted.round.scripts, wanted.round.token, wanted.step - 1)
            wanted.round.token = ""
            return self._try(wanted, publisher, restores=restores)
        self._has_losses = reply.outcome == "lost"
        return reply

    def _poll(self, *, restores: bool) -> ParameterRecord | None:
        """Returns the record; with ``restores``, None if the server has lost it.

        Raises:
            NotFoundError: the parameters were deleted, or there are others now.
        """
        try:
            return self._reader.poll(RETIRED, *OF_STATE)
        except NotFoundError:
            if not restores or whereabouts(self._transport, self._keys, self._reader.incarnation) != "lost":
                raise
            return None

    def check_partitions(self, keys: ParameterKeys, *, begun: bool = False) -> None:
        """Raises InvalidArgumentError if parameters have another number of partitions than the caller has asked for.

        Args:
            keys: their keys.
            begun: whether somebody has only begun to publish the first version.
        """
        if not isinstance(self._partitions, int) or self._partitions == (len(keys.partitions) or 1):
            return
        if begun:
            left_ms = self._transport.call("PTTL", keys.record)
            raise InvalidArgumentError(
                f"another process has begun to publish parameters {shown(keys.name)} with {len(keys.partitions)} "
                f"partitions, not {self._partitions}, and has not finished. Publish with the same number of "
                "partitions; or, if that process has ended, delete() the parameters, or wait "
                f"{seconds_text(left_ms / 1000)}, until its attempt expires"
            )
        raise InvalidArgumentError(
            f"parameters {shown(keys.name)} were created as something else: their number of partitions is "
            f"{len(keys.partitions) or 1}, not {self._partitions}"
        )

    def _first(self, wanted: Wanted, *, restores: bool) -> tuple[str, ParameterKeys]:
        """Returns the incarnation that parameters get with their first version, and their keys."""
        begun = self._reader.begun()
        if restores and self._reader.incarnation:
            # Partitions are chosen for a cluster, and never change.
            if begun is None:
                return self._reader.incarnation, self._reader.keys
            if begun[0] != self._reader.incarnation:
                raise refused(OF_PARAMETERS["replaced"], self._keys)
        if begun is not None:
            # Somebody else is publishing the first version, or died while publishing it.
            self.check_partitions(begun[1], begun=True)
            return begun
        name, slot_map = self._keys.name, None
        if self._partitions in (None, 1):
            return secrets.token_hex(16), ParameterKeys(name)
        if self._transport.cluster is not None:
            slot_map = self._transport.slot_map()
        number = self._partitions
        if not isinstance(number, int):
            number = automatic_partitions(wanted.schema.stored(self._encoding).nbytes, slot_map)
        return secrets.token_hex(16), ParameterKeys(name, choose_partitions(name, number, slot_map))

    def _version(
        self, version: str, wanted: Wanted, follows: Follows, last: _Published | None, publisher: str
    ) -> Version:
        """Returns a version as it travels to the server, given its id and the version before."""
        schema, arrays, before, changed = wanted.schema, wanted.arrays, Manifest(()), dict[int, Array]()
        stored = schema.stored(self._encoding)
        earlier = before if last is None else last.manifest
        # All leaves are uploaded whole if they are encoded in another way than before, or if parts are lost.
        if last is not None and last.encoding == self._encoding and not follows.replaces:
            before = earlier
            # If the caller does not know the last version, it cannot know which rows differ from that one.
            changed = {**wanted.changed} if last.version == self._callers else {}
        leaves = range(len(schema.leaves))
        manifest, rows = plan_leaves(stored, version, wanted.step, leaves=leaves, before=before, changed=changed)
        pieces = brought_leaves(
            stored, version, manifest, arrays, {leaf: (at, arrays[leaf].take(at, axis=0)) for leaf, at in rows.items()}
        )
        structure = ""
        if wanted.state is not None:
            of_state, values = wanted.state
            state, structure = Blob(f"{version}-state", _whole(of_state).nbytes), of_state.text
            manifest, pieces[state] = replace(manifest, state=state), packed(of_state, values, _whole(of_state))
        return Version(
            id=version,
            follows=follows,
            publisher=publisher,
            schema=schema,
            encoding=self._encoding,
            change=retire(manifest, stored, earlier, stored if last is None else schema.stored(last.encoding)),
            fields=["state_structure", structure],
            pieces=pieces,
            finished=wanted.finished,
            round=wanted.round,
            kept=wanted.kept,
        )

    def _agreed(self, wanted: Wanted) -> Wanted:
        """Returns the same, if its tree is like the one that is published.

        Raises:
            InvalidArgumentError: it is not.
        """
        schema = self._reader.schema()
        if schema is not wanted.schema:
            wanted = replace(wanted, schema=schema, arrays=self._arrays_of(schema, wanted.tree))
        return wanted

    def _arrays_of(self, schema: Schema, tree: object) -> Sequence[Array]:
        try:
            return schema.arrays_of(tree, "tree")
        except InvalidArgumentError as error:
            if error.__cause__ is not None:
                # Somebody else's object raised, so nothing is known about its structure.
                raise
            raise InvalidArgumentError(
                f"parameters {shown(self._keys.name)} keep the structure, dtypes and shapes of their first version: "
                f"{error}. Choose another name for another model, or delete this one with `redisacc rm`"
            ) from None

    def _is_there(self, wanted: Wanted, record: ParameterRecord) -> bool:
        """Returns whether exactly this is published already; False if it was replaced during the comparison.

        Raises:
            ConflictError: something else is published for this step, or for a later one.
        """
        if wanted.step < record.step:
            raise ConflictError(
                f"parameters {shown(self._keys.name)} have step {record.step} already, so step {wanted.step} cannot be "
                "published: another chief is publishing, or this one has continued from older weights"
            )
        try:
            tree, state = self._reader.values(record), self._reader.state(record)
        except PartMissingError as error:
            self._reader.after_loss(record, error, math.inf)
            return False
        # The published version was rounded, so the wanted one is rounded for the comparison.
        stored = wanted.schema.stored(record.encoding)
        path = _difference(stored, wanted.arrays, stored.structure.leaves_of(tree, "tree"))
        where = None if path is None else f"the tree at {shown(path)}"
        if where is None:
            where = _state_difference(wanted.state, None if state is None else schema_of(state, "state"))
        if where is not None:
            raise ConflictError(
                f"step {wanted.step} of parameters {shown(self._keys.name)} is published already, and differs in "
                f"{where}: another chief is publishing, or this one has computed something else than before"
            )
        if wanted.finished and not record.finished:
            # The version was published by a call without ``finished``.
            self.finish(True)
        self._callers = record.version
        return True


def schema_of(tree: object, what: str) -> tuple[Schema, list[Array]]:
    """Returns the schema of a tree, and its leaves as arrays.

    Raises:
        InvalidArgumentError: it is no tree of arrays, or it is too large.
    """
    structure, arrays = flatten_arrays(tree, what)
    schema = Schema(
        structure,
        [Leaf.of(values, f"{what} at {shown(path)}") for path, values in zip(structure.paths, arrays, strict=True)],
    )
    if _whole(schema).nbytes > MAX_BLOB_BYTES:
        raise InvalidArgumentError(f"{what} must have at most {MAX_BLOB_BYTES} bytes, not {schema.nbytes}")
    return schema, arrays


def _whole(schema: Schema) -> Layout:
    """Returns the layout of a blob that has all leaves."""
    return schema.layout(ranges_text(range(len(schema.leaves))))


def _checked_rows(schema: Schema, changed: object) -> dict[int, Array]:
    """Returns which rows have changed: leaf → their indices, ascending and each once."""
    if not isinstance(changed, Mapping):
        raise InvalidArgumentError(f"changed must be a dict from paths of leaves to indices, not {shown(changed)}")
    found = {}
    try:
        pairs = list(changed.items())
    except Exception as error:
        if interrupt_in(error) is not None:
            raise
        raise InvalidArgumentError(
            f"changed cannot be read: {shown(type(changed).__name__)} raised {type(error).__name__}: "
            f"{shown(str(error))}"
        ) from error
    for path, given in pairs:
        leaf = schema.structure.numbers.get(path) if isinstance(path, str) else None
        if leaf is None:
            raise InvalidArgumentError(f"changed names {shown(path)}, which is not the path of a leaf")
        shape, what = schema.leaves[leaf].shape, f"changed[{shown(path)}]"
        if not shape:
            raise InvalidArgumentError(f"{what} cannot be given: the leaf is a scalar, and has no rows")
        rows, last, ascending = indices(given, what)
        if last >= shape[0]:
            raise InvalidArgumentError(f"{what} must be below {shape[0]}, the number of rows, but holds {last}")
        found[leaf] = rows if ascending else np.unique(rows)
    return found


def _difference(schema: Schema, one: Sequence[Array], other: Sequence[Array]) -> str | None:
    """Returns the path of the first leaf whose bytes differ, or None."""
    for path, leaf, left, right in zip(schema.structure.paths, schema.leaves, one, other, strict=True):
        if not np.array_equal(leaf.bytes_of(left), leaf.bytes_of(right)):
            return path
    return None


def _state_difference(
    one: tuple[Schema, Sequence[Array]] | None, other: tuple[Schema, Sequence[Array]] | None
) -> str | None:
    if one is None or other is None:
        return None if one is other else "whether there is a state"
    if one[0].text != other[0].text:
        return "the structure of the state"
    path = _difference(one[0], one[1], other[1])
    return None if path is None else f"the state at {shown(path)}"
