"""The command `redisacc ls`: lists accumulators and parameters, one on a line."""

from __future__ import annotations

import click

from redisacc._admin.catalogue import list_names
from redisacc._admin.memory import memory
from redisacc._format.keys import Keys, ParameterKeys
from redisacc._monitoring.facts import bytes_text, count_text, everything_of, schema_shape_text
from redisacc._protocol.lifecycle.info import AccumulatorInfo, read_info
from redisacc._protocol.parameters.info import ParametersInfo, read_parameters_info
from redisacc._text import age_text, printable, shown
from redisacc.cli.shared.failures import EXIT_CODES, report_failures
from redisacc.cli.shared.options import json_option, redis_option, transport_of
from redisacc.cli.shared.output import echo_json, echo_wrapped, print_table
from redisacc.errors import CorruptDataError, NotFoundError

__all__ = ["ls"]


@click.command(epilog=EXIT_CODES)
@click.argument("pattern", default="*")
@click.option("--private", is_flag=True, help="Include private accumulators (scans all keys of the server).")
@redis_option
@json_option
@report_failures
def ls(*, pattern: str, private: bool, url: str | None, as_json: bool) -> None:
    """List accumulators and parameters.

    PATTERN is a glob as Redis understands it, for example 'demo-*'; without it, all are listed. "+1" behind the DTYPE
    of a tree means that its leaves have one more dtype. WAITING is the number of gradients that the first waiting taker
    requires, and "+1" behind it means that one more taker is waiting. BYTES is the memory in Redis, including rounds
    that were taken but not acknowledged.
    """
    transport = transport_of(url)
    found: list[tuple[AccumulatorInfo, int]] = []
    parameters: dict[str, ParametersInfo] = {}
    for name in list_names(transport, pattern, private=private):
        keys = Keys(name)
        try:
            if (published := read_parameters_info(transport, ParameterKeys(name))) is not None:
                parameters[name] = published
        except CorruptDataError as error:
            click.echo(f"redisacc: {printable(str(error))}", err=True)
        try:
            found.append((read_info(transport, keys), sum(sort.nbytes for sort in memory(transport, keys))))
        except NotFoundError:
            # Deleted since it was listed, or a name without a record, which `redisacc gc` removes.
            continue
        except CorruptDataError as error:
            click.echo(f"redisacc: {printable(str(error))}", err=True)
    if as_json:
        listed = [{**everything_of(info, parameters.pop(info.name, None)), "bytes": size} for info, size in found]
        echo_json([*listed, *(everything_of(None, of) for of in parameters.values())])
        return
    if not found and not parameters:
        matching = "" if pattern == "*" else f" matching {shown(pattern)}"
        echo_wrapped(f"no accumulators{matching} at {transport.address}", err=True)
        return
    print_table(
        ["NAME", "KIND", "DTYPE", "SHAPE", ">STEP", ">COUNT", ">WAITING", ">BYTES", ">ACTIVE"],
        [
            [
                info.name,
                info.kind,
                _dtype_text(info),
                schema_shape_text(info),
                str(info.global_step),
                str(info.num_accumulated),
                waiting_text(info),
                bytes_text(size) if size else "-",
                age_text(info.read_at, info.last_activity),
            ]
            for info, size in found
        ]
        + [
            [
                info.name,
                "parameters",
                "-",
                count_text(info.leaves, "leaf", "leaves"),
                str(info.step),
                *("-", "-"),
                bytes_text(info.stored_bytes),
                age_text(info.read_at, info.published_at),
            ]
            for info in parameters.values()
        ],
    )


def _dtype_text(info: AccumulatorInfo) -> str:
    """Returns the element type; for a tree, the first leaf's and the number of other types, as in "float32 +1"."""
    first, *others = info.dtype.split(",")
    return f"{first} +{len(others)}" if others else first


def waiting_text(info: AccumulatorInfo) -> str:
    """Returns the requirement of the first waiting taker and how many more wait, as in "3 +1"; "-" for no taker."""
    if not info.waiting:
        return "-"
    behind = len(info.waiting) - 1
    return str(info.waiting[0].num_required) + (f" +{behind}" if behind else "")
