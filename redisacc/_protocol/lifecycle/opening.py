"""Opens an accumulator, or creates it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from typing import Any, Literal

from redisacc._arrays.spec import AccumulatorSpec
from redisacc._arrays.trees import difference, parse_structure
from redisacc._format.keys import DELETING, NAMES, Keys, automatic_partitions, choose_partitions, partitions_text
from redisacc._format.record import ABSENT, BUFFER_LIMIT_BY_WORKER, FIELDS, FORMAT, SETTINGS, check_format
from redisacc._format.stored_text import foreign, parsed
from redisacc._protocol.lifecycle.deletion import delete
from redisacc._protocol.scripts import OF_ACCUMULATORS, Reply, Scripts, text_of
from redisacc._text import QUOTED, printable, shown
from redisacc._wire.faults import NotPermittedError
from redisacc._wire.script_loader import load
from redisacc._wire.transport import Transport
from redisacc.errors import InvalidArgumentError, NotFoundError

logger = logging.getLogger("redisacc")


def open_accumulator(
    transport: Transport,
    keys: Keys,
    spec: AccumulatorSpec,
    settings: Mapping[str, Any],
    *,
    partitions: int | Literal["auto"] | None,
    lease_ms: int,
    create: bool,
) -> Reply:
    """Opens or creates the accumulator with these keys.

    Args:
        transport: the way to the server.
        keys: the keys of the accumulator.
        spec: the specification that the caller expects.
        settings: the values of the fields that are ``SETTINGS``. None means as with an existing accumulator, and the
            default for a new one.
        partitions: among how many slots the parts of its gradients are spread; "auto": as many as there are masters,
            if its gradients are large enough; None means as with an existing accumulator, and 1 for a new one.
        lease_ms: how long a private accumulator outlives its owner, in milliseconds; 0: it is shared, and stays.
        create: whether to create it if there is none.

    Returns:
        The accumulator as it was created, by the fields of its record; and ``can_add_in_place``, whether the server's
        Lua can add.

    Raises:
        NotFoundError: there is none, and none was to be created.
        InvalidArgumentError: it was created as something else.
        CorruptDataError: the record belongs to another version of the data model.
    """
    new = {field.name: field.default for field in SETTINGS}
    if settings["order"] == "worker":
        new["buffer_limit"] = BUFFER_LIMIT_BY_WORKER
    new |= {name: value for name, value in settings.items() if value is not None}
    chosen = _partitions(transport, keys, spec, partitions) if create else ()
    scripts = Scripts(transport, keys, OF_ACCUMULATORS)
    while True:
        try:
            opened = scripts.open(
                **{name: str(int(value)) if isinstance(value, int) else value for name, value in new.items()},
                **spec.schema,
                incarnation=secrets.token_hex(16),
                format=FORMAT,
                chunk=spec.chunk,
                lease_ms=lease_ms,
                partitions=partitions_text(chosen),
                create=create,
            )
        except NotPermittedError:
            # An observer may read but not run scripts. The server refuses everything else that it tries as well.
            found = _read_only(transport, keys, scripts)
            if found is None:
                raise
            opened = found
        except NotFoundError:
            if create:
                raise
            raise NotFoundError(
                f"there is no accumulator {shown(keys.name)}, and create=False forbids to create one"
            ) from None
        if opened.outcome == "other_format":
            check_format(keys.name, opened.format)
        if opened.outcome == "opened":
            break
        # Somebody is deleting it, or died while deleting it. Finishing their work twice does no harm.
        delete(transport, keys, opened.incarnation)
    _parse_settings(keys, opened)
    opened.can_add_in_place = opened.struct == "yes"
    _check_schema(keys, opened, {**spec.schema, **settings}, partitions)
    if not lease_ms:
        list_name(transport, keys.name)
    return opened


def _parse_settings(keys: Keys, opened: Reply) -> None:
    for field in FIELDS:
        if field in SETTINGS or field.name in ("partitions", "chunk"):
            setattr(opened, field.name, parsed(keys.record, field.name, str(getattr(opened, field.name)), field.parse))


def _read_only(transport: Transport, keys: Keys, scripts: Scripts) -> Reply | None:
    """Reads what the script would reply; None if there is nothing that can be used."""
    names = load("open").replies["opened"][2:]
    values = transport.call("HMGET", keys.record, *names)
    absent = {**ABSENT, "losses": b"0"}
    found: dict[str, Any] = {
        name: absent.get(name) if value is None else value for name, value in zip(names, values, strict=True)
    }
    if isinstance(found["format"], bytes):
        check_format(keys.name, text_of(found["format"]))
    if any(not isinstance(value, bytes) for value in found.values()):
        return None
    if found["incarnation"].startswith(DELETING.encode()):
        return None
    return scripts.parse("open", [b"opened", b"no", b"0", *found.values()])


def _partitions(
    transport: Transport, keys: Keys, spec: AccumulatorSpec, wanted: int | Literal["auto"] | None
) -> tuple[int, ...]:
    """Returns the partitions that the accumulator gets if it is created now."""
    if wanted in (None, 1):
        return ()
    slot_map = transport.slot_map() if transport.cluster is not None else None
    number = automatic_partitions(spec.gradient_bytes, slot_map) if wanted == "auto" else wanted
    assert isinstance(number, int)
    return choose_partitions(keys.name, number, slot_map)


def _check_schema(
    keys: Keys, opened: Reply, wanted: Mapping[str, Any], partitions: int | Literal["auto"] | None
) -> None:
    # Of two trees, the leaf in which they differ says more.
    is_tree = opened.kind == wanted["kind"] == "tree"
    differences = [
        f"{field.option} is {printable(there, QUOTED) if isinstance(there, str) else there}, not {wanted[field.name]}"
        for field in FIELDS
        if field.option
        and wanted[field.name] not in (None, there := getattr(opened, field.name))
        and not (is_tree and field.name in ("dtype", "shape"))
    ]
    number = len(opened.partitions) or 1
    if isinstance(partitions, int) and partitions != number:
        differences.append(f"number of partitions is {number}, not {partitions}")
    if is_tree and opened.tree != wanted["tree"]:
        differences.append(_tree_difference(keys, opened.tree, wanted["tree"]))
    if differences:
        raise InvalidArgumentError(
            f"accumulator {shown(keys.name)} was created as something else: its {'; its '.join(differences)}. "
            "Ask for the same, choose another name, or delete it with `redisacc rm`"
        )


def _tree_difference(keys: Keys, there: str, here: str) -> str:
    """Returns in which leaf or node, the first of them, two trees differ."""
    wanted = parse_structure(here)
    try:
        found = parse_structure(there)
    except ValueError as error:
        raise foreign(keys.record, "tree", there, error) from None
    first = difference(found, wanted)
    # Texts that differ describe trees that differ, because a structure has one text only.
    assert first is not None
    path, one, other = first
    return f"tree has {printable(one, QUOTED)} at {shown(path)}, not {printable(other, QUOTED)}"


def list_name(transport: Transport, name: str) -> None:
    """Adds a name to the set of all names."""
    try:
        # The list has a slot of its own in a cluster, so the script cannot write it. A server that is full would refuse
        # even to add a name that is there already.
        if not transport.call("SISMEMBER", NAMES, name):
            transport.call("SADD", NAMES, name)
    except NotPermittedError as error:
        # Only listings use the set of names.
        logger.debug("%s is not listed: %s", name, error)
