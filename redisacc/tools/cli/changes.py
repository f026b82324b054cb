"""The commands that change a run: `redisacc set`, `redisacc finish` and `redisacc rm`."""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import click

from redisacc._arrays import validation
from redisacc._format.keys import DELETING, REST, SNAPSHOT, Keys, ParameterKeys
from redisacc._format.quorum import LONGEST_GRACE
from redisacc._handles.existing import open_existing
from redisacc._handles.parameters import Parameters
from redisacc._protocol.leases.forgetting import forget_worker
from redisacc._protocol.lifecycle import deletion
from redisacc._protocol.lifecycle.info import AccumulatorInfo, read_info
from redisacc._protocol.parameters.deletion import delete_parameters
from redisacc._protocol.parameters.info import read_parameters_info
from redisacc._text import age_text, printable, shown
from redisacc._wire.transport import Transport
from redisacc.errors import CorruptDataError, NotFoundError
from redisacc.tools.admin.catalog import escape_glob, list_names
from redisacc.tools.cli.shared.failures import NOT_FOUND, fail, refuse
from redisacc.tools.cli.shared.options import (
    Seconds,
    command,
    confirm,
    keys_of,
    name_argument,
    names_argument,
    targets_of,
    the_server,
)
from redisacc.tools.cli.shared.output import echo_wrapped, report
from redisacc.tools.monitoring.facts import count_text

_STEP = "step"
# The name before the "=" → the type of its value. All but the step are arguments of `set_quorum`.
_FIELDS: dict[str, click.ParamType[Any]] = {
    "least": click.IntRange(min=1),
    "most": click.IntRange(min=1),
    "grace": Seconds(min=0, max=LONGEST_GRACE),
    _STEP: click.IntRange(validation.INT64_MIN, validation.INT64_MAX),
}


def _change(
    context: click.Context, parameter: click.Parameter, words: tuple[str, ...]
) -> dict[str, int | float | None]:
    """Returns name → value for words such as ``least=3``, or ends the command."""
    change: dict[str, int | float | None] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if name not in _FIELDS or not equals:
            expected = ", ".join(f"{known}=VALUE" for known in _FIELDS)
            raise click.BadParameter(f"'{word}' is none of {expected}.", context, parameter)
        if name in change:
            raise click.BadParameter(f"{name} is given twice.", context, parameter)
        is_none = name != _STEP and text in ("", "none")
        change[name] = None if is_none else _FIELDS[name].convert(text, parameter, context)
    return change


@command(yes=True)
@name_argument
@click.argument("change", metavar="[NAME=VALUE]...", nargs=-1, callback=_change)
@click.option("--forget", metavar="WORKER", help="Forget a worker that will not return.")
def set(*, name: str, change: dict[str, Any], forget: str | None) -> None:  # noqa: A001 - named as the command
    """Change how many gradients a step waits for, and how long; set the step; or forget a worker.

    least is how many gradients a step needs, grace for how many seconds it then waits for more, and most how many end
    the grace. Numbers that you leave out stay as they are; an empty value, or none, removes a number. A chief that is
    waiting follows at once, and so does any other take without its own numbers. For example, if a machine will not
    return, lower least, and the run continues:

    \b
      redisacc set embeddings least=3
      redisacc set embeddings least=3 most=4 grace=0.5
      redisacc set embeddings most=none grace=none

    step sets the global step. Gradients of earlier steps are dropped from then on; gradients that have been accumulated
    stay, and the next take returns them as gradients of the new step. So the command asks before it passes over a round
    that is not empty. It also asks before it lowers the step, because that accepts old gradients again.

    \b
      redisacc set embeddings step=100

    With --forget, the worker is no longer listed as late or gone. Its gradients in the round still count. If it sends
    another gradient, it is listed again. A worker of a training run, such as 'worker 3', can be forgotten once its
    lease has run out.

    \b
      redisacc set embeddings --forget spot-17:4242
    """
    refuse(
        (forget is None) == (not change) or (_STEP in change and len(change) > 1),
        "give numbers of the quorum, such as least=3; or step=N alone; or --forget WORKER alone",
    )
    # Held until the handle holds it, so that both use the same connections.
    transport = the_server()
    if forget is not None:
        _forget(transport, keys_of(name), forget)
        return
    accumulator = open_existing(keys_of(name), redis=transport)
    if _STEP in change:
        before = _confirm_step(name, accumulator.info(), change[_STEP])
        accumulator.set_global_step(change[_STEP])
        report({"before": before, "global_step": change[_STEP]}, f"the step is now {change[_STEP]}; it was {before}")
        return
    quorum = accumulator.quorum()
    accumulator.set_quorum(**change)
    after = accumulator.quorum()
    report(
        {"before": dataclasses.asdict(quorum), "quorum": dataclasses.asdict(after)},
        f"{printable(name)}: {str(after) or 'none'} (before: {str(quorum) or 'none'})",
    )


def _confirm_step(name: str, info: AccumulatorInfo, step: int) -> int:
    """Asks before the step is lowered, or passes over a round that is not empty. Returns the step until now."""
    before = info.global_step
    if step < before:
        confirm(f"Lower the step of {printable(name)} from {before} to {step} and accept old gradients again?")
    elif step > before and info.num_accumulated:
        gradients = count_text(info.num_accumulated, "gradient")
        echo_wrapped(f"the round of step {before} has {gradients}, which would count for step {step}", err=True)
        confirm(f"Set the step of {printable(name)} to {step}?")
    return before


def _forget(transport: Transport, keys: Keys, worker: str) -> None:
    worker = validation.text(worker, "WORKER", max_bytes=200)
    info = read_info(transport, keys)
    known = {each.name: each for each in info.known_workers}
    if not forget_worker(transport, keys, info.incarnation, worker):
        fail(f"{shown(keys.name)} knows no worker {shown(worker)}", NOT_FOUND)
    seen = f", last seen {age_text(info.read_at, known[worker].seen_at)} ago" if worker in known else ""
    text = f"{printable(keys.name)} has forgotten {printable(worker)}{seen}"
    report({"name": keys.name, "forgotten": worker}, text)


@command()
@name_argument
def finish(*, name: str) -> None:
    """End a training run: the loops of all processes end after the same step, within a second.

    Nothing is lost: a round that is complete still counts, and the parameters stay. If you start the program again, it
    continues up to its last step.
    """
    with Parameters(keys_of(name).name, redis=the_server()) as parameters:
        parameters.finish()
        step = parameters.step()
    text = f"{printable(name)} is finished at step {step}: the loops of its processes end within a second"
    report({"finished": True, "step": step}, text)


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class _Age(click.ParamType[datetime.timedelta]):
    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime.timedelta:
        match = re.fullmatch(r"([0-9]{1,6})([smhd])", str(value))
        if match is None:
            self.fail(f"{value!r} is no age: give a whole number and s, m, h or d, such as 30d.", param, ctx)
        return datetime.timedelta(seconds=int(match[1]) * _UNITS[match[2]])


@command(yes=True)
@names_argument
@click.option(
    "--older-than",
    type=_Age(),
    metavar="AGE",
    help="Delete only names without activity for that long, such as 12h or 30d: all of them, or those that match NAME, "
    "which may then be a glob. Names with a leader or a waiting taker are kept.",
)
def rm(*, names: tuple[str, ...], older_than: datetime.timedelta | None) -> None:
    """Delete accumulators and parameters, and everything in them, for every process.

    If an accumulator and parameters have the same name, both are deleted. Handles on them raise errors from then on. If
    one of the names does not exist, nothing is deleted.

    \b
      redisacc rm embeddings
      redisacc rm 'test-*' --older-than 30d
    """
    refuse(not names and older_than is None, "give the name of at least one accumulator, or --older-than AGE")
    transport = the_server()
    wanted = _targets(transport, names, older_than)
    found = [(keys, contents) for keys in wanted if (contents := _old_enough(transport, keys, older_than))]
    if not found and older_than is not None:
        _report_deleted([])
        return
    for keys, contents in found:
        echo_wrapped(f"{printable(keys.name)}: {'; '.join(of.text for of in contents)}", err=True)
    confirm("Delete this for every process?")
    deleted = []
    for keys, contents in found:
        # While the question was on the screen, somebody may have begun to use it again.
        if older_than is None or _old_enough(transport, keys, older_than):
            for of in contents:
                of.delete()
            deleted.append(keys.name)
    _report_deleted(deleted)


def _report_deleted(names: Sequence[str]) -> None:
    text = f"deleted {', '.join(map(printable, names))}" if names else "there is nothing that old"
    report({"removed": names}, text)


def _targets(transport: Transport, names: Sequence[str], older_than: datetime.timedelta | None) -> list[Keys]:
    if older_than is None:
        listed = {keys.name: keys for keys in map(keys_of, names)}
        wanted = [escape_glob(name + more) for name in listed for more in (REST, SNAPSHOT)]
        more = {name: Keys(name) for glob in wanted for name in list_names(transport, glob)}
        return list({**listed, **more}.values())
    globs, keys = targets_of(names)
    matching = {name for glob in globs for name in list_names(transport, glob)}
    return [Keys(name) for name in sorted(matching | {of.name for of in keys})]


@dataclass
class _Contents:
    """What has a name. ``age``: how long nothing has happened to it; None if that is unknown, or somebody uses it."""

    text: str
    delete: Callable[[], None]
    age: datetime.timedelta | None = None


def _old_enough(transport: Transport, keys: Keys, older_than: datetime.timedelta | None) -> list[_Contents]:
    """Returns what has this name; nothing unless all of it is that old.

    Raises:
        NotFoundError: nothing has, and no age is asked for.
    """
    contents = contents_of(transport, keys)
    if older_than is None:
        if not contents:
            raise NotFoundError(f"there is no accumulator {shown(keys.name)}, and there are no parameters of this name")
        return contents
    return contents if all(of.age is not None and of.age >= older_than for of in contents) else []


def contents_of(transport: Transport, keys: Keys) -> list[_Contents]:
    """Returns what has this name: an accumulator, parameters, both, or nothing.

    Raises:
        CorruptDataError: redisacc did not write a record of this name.
    """
    parameters, contents = ParameterKeys(keys.name), list[_Contents]()
    for record, look, delete in (
        (keys.record, partial(_look_at_accumulator, transport, keys), partial(deletion.delete, transport, keys)),
        (
            parameters.record,
            partial(_look_at_parameters, transport, parameters),
            partial(delete_parameters, transport, parameters),
        ),
    ):
        # Read before what is shown: if the name is created again in between, that is not deleted.
        incarnation = transport.call("HGET", record, "incarnation")
        if incarnation is None and not transport.call("EXISTS", record):
            continue
        try:
            text, age = look()
        except CorruptDataError as error:
            # Deleted nevertheless, if the record says what it belongs to.
            text, age = f"unreadable ({printable(str(error))})", None
        if not incarnation or not incarnation.isascii():
            raise CorruptDataError(f"{record}: incarnation holds {shown(incarnation)}, which redisacc did not write")
        contents.append(_Contents(text, partial(delete, incarnation.decode().removeprefix(DELETING)), age))
    return contents


def _look_at_parameters(transport: Transport, keys: ParameterKeys) -> tuple[str, datetime.timedelta | None]:
    """Returns what the parameters are, and their age."""
    info = read_parameters_info(transport, keys)
    if info is None:
        return "parameters without a version: somebody has begun to publish or to delete them", None
    text = f"parameters of step {info.step}, {count_text(info.leaves, 'leaf', 'leaves')}"
    return text, info.read_at - info.published_at


def _look_at_accumulator(transport: Transport, keys: Keys) -> tuple[str, datetime.timedelta | None]:
    """Returns what the accumulator holds, and its age."""
    info = read_info(transport, keys)
    text = f"step {info.global_step}, {count_text(info.num_accumulated, 'gradient')} in the round"
    if info.unacknowledged:
        text += f", {count_text(len(info.unacknowledged), 'round')} taken but not acknowledged"
    if info.waiting:
        text += f", {count_text(len(info.waiting), 'waiting taker')}"
    return text, None if info.chief or info.waiting else info.read_at - info.last_activity
