"""What commands are made of: options and arguments that several share, what they refer to, and the last question."""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
from click.shell_completion import CompletionItem

from redisacc._clock import durations
from redisacc._format.keys import PREFIX, Keys
from redisacc._text import is_unicode, shown
from redisacc._wire.connect import DEFAULT_URL, connect
from redisacc._wire.transport import Transport, limited
from redisacc.errors import InvalidArgumentError, RedisAccError
from redisacc.tools.admin.catalog import escape_glob, list_names
from redisacc.tools.cli.shared.failures import EXIT_CODES, USAGE, fail, report_failures
from redisacc.tools.cli.shared.output import given

# How many names the shell is offered at most.
_COMPLETIONS = 100


class Seconds(click.FloatRange):
    """A number of seconds. ``nan``, which is neither below nor above any bound, is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Returns the number, or ends the command."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value} is not a number of seconds.", param, ctx)
        return number


class NonEmptyPath(click.Path):
    """A path. The empty one, which would mean the current directory, is refused: a variable is probably not set.

    Args:
        kind: what the command gets: Path; or str, for what may be an address as well.
    """

    def __init__(self, kind: type[Path | str] = Path) -> None:
        super().__init__(path_type=kind)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the path, or ends the command."""
        if value == "":
            self.fail("the path is empty; for the current directory, give a dot.", param, ctx)
        return super().convert(value, param, ctx)


PASSWORD = "REDISACC_PASSWORD"  # noqa: S105 - the name of a variable


def _note(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    context.meta[f"redisacc.{parameter.name}"] = value


def _note_with_password(context: click.Context, parameter: click.Parameter, url: str | None) -> None:
    """Notes a URL with the password of the environment, if it has none."""
    scheme, mark, rest = (url or DEFAULT_URL).partition("://")
    password = os.environ.get(PASSWORD)
    if password and mark and "@" not in rest and "password=" not in rest:
        url = f"{scheme}://:{quote(password, safe='')}@{rest}"
    _note(context, parameter, url)


def _redis(*, password: bool) -> click.Option:
    return click.Option(
        ["--redis", "url"],
        envvar="REDISACC_URL",
        metavar="URL",
        callback=_note_with_password if password else _note,
        expose_value=False,
        help=f"The server{f', with the password in {PASSWORD} if the URL has none' * password}.  "
        f"[default: REDISACC_URL, else {DEFAULT_URL}]",
    )


_FLAG: dict[str, Any] = {"is_flag": True, "callback": _note, "expose_value": False}
_JSON = click.Option(["--json"], help="Print JSON.", **_FLAG)
_YES = click.Option(["--yes", "-y"], help="Do not ask for confirmation.", **_FLAG)


# The settings of each command, so that it has the same help where it is used without the group.
HELP = {"help_option_names": ["-h", "--help"], "show_default": True}


def command(
    *, json: bool = True, yes: bool = False, password: bool = True, epilog: str = EXIT_CODES, **settings: Any
) -> Callable[[Callable[..., None]], click.Command]:
    """Makes a command of a function: it ends with one line and an exit code if something expected goes wrong.

    Its last options are --redis and those that are asked for here. Their values are no parameters of the function:
    whatever needs them asks ``given``.

    Args:
        json: whether it has the option --json.
        yes: whether it has the option --yes.
        password: whether the server's password may be in the environment.
        epilog: the last lines of its help.
        settings: further arguments of ``click.command``.
    """

    def make(function: Callable[..., None]) -> click.Command:
        settings["context_settings"] = {**HELP, **settings.get("context_settings", {})}
        made = click.command(cls=click.Command, epilog=epilog, **settings)(report_failures(function))
        made.params += [_redis(password=password), *([_YES] if yes else []), *([_JSON] if json else [])]
        return made

    return make


def _complete_names(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    # Silent where no server answers: this runs while somebody types.
    try:
        found = list_names(connect(context.meta.get("redisacc.url") or None), escape_glob(incomplete) + "*")
    except RedisAccError:
        return []
    return [CompletionItem(text) for text in itertools.islice(filter(str.isprintable, found), _COMPLETIONS)]


# Arguments, which the shell completes.
name_argument = click.argument("name", shell_complete=_complete_names)
names_argument = click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=_complete_names)


def keys_of(name: str) -> Keys:
    """Returns the keys of an accumulator, given by its name or by its ``accumulator_ref``.

    Raises:
        InvalidArgumentError: no accumulator can have this name.
    """
    if name.startswith(f"{PREFIX}{{"):
        return Keys.of_ref(name)
    if not name or any(character in "{}" for character in name) or not is_unicode(name):
        raise InvalidArgumentError(
            f"no accumulator can have the name {shown(name)}: a name must be valid Unicode, and must not be empty or "
            "contain braces"
        )
    return Keys(name)


def targets_of(names: Sequence[str]) -> tuple[list[str], list[Keys]]:
    """Returns what names on a command line refer to: globs, ["*"] if there are no names at all; and accumulators."""
    globs = [name for name in names if any(character in name for character in "*?[")]
    return globs if names else ["*"], [keys_of(name) for name in names if name not in globs]


def transport_of(url: str | None) -> Transport:
    """Returns the transport to a server that has just answered. Blocks for at most a few seconds.

    Raises:
        ServerUnavailableError: the server does not answer.
    """
    transport = connect(url)
    # Not PING, which the access rules of an observer do not allow.
    with limited(durations.opening):
        transport.call("TIME")
    return transport


def the_server() -> Transport:
    """Returns the transport to the server that the command was given, as ``transport_of`` does."""
    return transport_of(given("url"))


def confirm(question: str) -> None:
    """Asks before something is deleted for good. Returns if the answer is yes, and at once with --yes.

    Raises:
        Failure: the answer is no, or the input is not a terminal and --yes is missing.
    """
    if given("yes"):
        return
    if not sys.stdin.isatty():
        fail("this needs a confirmation, and the input is not a terminal; --yes confirms in advance", USAGE)
    if not click.confirm(question, err=True):
        fail("canceled, nothing was changed")
