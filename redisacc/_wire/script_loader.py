"""Assembles the Lua scripts, and binds their keys and arguments to names.

The header of a script is the only place that lists its keys and arguments. A line names one of them, or a list::

    -- KEYS record     redisacc:{NAME}               the record
    -- KEYS parts...   redisacc:{NAME}:part:ID:K     the parts of a gradient
    -- ARGV worker     text                          name under which the gradient is counted
    -- ARGV lengths... number                        bytes of each part

The line ``-- #bind`` below the header becomes the Lua lines that put them into the tables ``keys`` and ``args``, and
`Script.on` makes a function that gets the values by the same names and puts them into the same order, so no code counts
positions, and none lists keys: it derives them from the patterns. The function is compiled once for each script, so a
call builds what is sent and does nothing else.

What a script replies is in its header as well::

    -- {'applied', global_step, num_accumulated}   the gradient was added and counted

On the wire, the lists follow the single values. The last list of KEYS ends where KEYS ends, and the last of ARGV where
ARGV ends. If there are more lists, one argument between the single values and the lists holds the others' lengths.

A line ``-- #include "name"`` becomes the text of that file in ``lua/include``, with its own includes. An include inside
a block belongs to that block, and a script creates its functions only when it enters the block. Creating one takes the
server 0.03 to 0.1 microseconds at every run, and a small gradient needs few of those for weights, graces and staleness.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from redisacc._wire.sockets import Argument

_PACKAGE = Path(__file__).resolve().parent.parent

# A wheel has the scripts inside the package, a checkout (an editable install) at the top of the repository.
_PLACES = (_PACKAGE / "lua", _PACKAGE.parent / "lua")

_BIND = re.compile(r"^-- #bind\n", re.MULTILINE)
# One line at the top level, or all that follow one another in a block.
_INCLUDE = re.compile(r'^-- #include "\w+"\n|(?:^ +-- #include "\w+"\n)+', re.MULTILINE)
_INCLUDED = re.compile(r'#include "(\w+)"')
_FIELD = re.compile(r"-- (?P<table>KEYS|ARGV) +(?P<name>[a-z_]+)(?P<many>\.\.\.)? +(?P<form>\S+)(?: {2,}\S.*)?")
_REPLY = re.compile(r"-- \{'(?P<outcome>\w+)'(?P<values>[^}]*)\}")
# What the keys of all names begin with. The base key of a name replaces it.
_BASE = "redisacc:{NAME}"
# A word of a key that is the value of an argument.
_WORD = re.compile(r"\b[A-Z]+\b")

# Type of an argument -> the Lua expression that makes the value of its text. An int64 remains text, because Lua's
# numbers are doubles and lose digits above 2^53.
_TYPES = {
    "text": "{}",
    "bytes": "{}",
    "int64": "{}",
    # Adding 0 takes half the time of tonumber(), and raises an error where that returns nil.
    "number": "{} + 0",
    # "" means none: tonumber turns it into nil.
    "number?": "tonumber({})",
    "flag": "{} == '1'",
}
# Type of the elements of a list -> how each is converted.
_LIST_TYPES = {"text": "", "bytes": "", "int64": "", "number": ", tonumber"}


@dataclass(frozen=True)
class Field:
    """One key or argument of a script, or a list of them, as a line of the header declares it.

    Attributes:
        name: the name on both sides.
        form: the pattern of a key, or the type of an argument.
        many: whether it is a list.
    """

    name: str
    form: str
    many: bool


class Script:
    """A script as the server gets it, and the order of its keys and arguments.

    Attributes:
        name: the name of the file, without its suffix.
        text: the Lua text, with its includes and bindings.
        sha: the SHA-1 hash by which the server knows the text.
        keys: the fields of KEYS, in the order of the header.
        args: the fields of ARGV, in the order of the header.
        replies: the first word of each reply -> the names of the values that follow it. The last one may be a list,
            as "attempt...".
    """

    def __init__(
        self, name: str, text: str, keys: Sequence[Field], args: Sequence[Field], replies: Mapping[str, Sequence[str]]
    ) -> None:
        self.name = name
        self.text = text
        # Redis names scripts by this hash, so nothing depends on its strength.
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        self.keys, self.args, self.replies = keys, args, replies

    @cached_property
    def sharded(self) -> Script:
        """The same script for a cluster with sharded channels.

        Its messages go to the node that has the keys, where waiting takers listen, instead of to every node. The two
        commands must not be in one script, because a server that lacks SPUBLISH fails where it is called.
        """
        text = self.text.replace("redis.pcall('PUBLISH'", "redis.pcall('SPUBLISH'")
        return Script(self.name, text, self.keys, self.args, self.replies)

    def on(self, base: str, **fixed: Argument) -> Callable[..., tuple[Script, Sequence[str], Sequence[Argument]]]:
        """Returns a function that returns the script, its keys and its arguments, all in the order of its header.

        The function gets all arguments by name, besides the fixed ones, and lists of keys; keys that are no list follow
        from their patterns. A flag may be anything that is true or false. A list that is left out is empty.

        Args:
            base: the key that stands for ``redisacc:{NAME}`` in the patterns.
            fixed: arguments that are the same in all calls.
        """
        made: Callable[..., Any] = self._maker(tuple(fixed))(self, base, *fixed.values())
        return made

    @cache  # noqa: B019
    def _maker(self, fixed: tuple[str, ...]) -> Callable[..., Any]:
        """Returns a function of the script, the base key and these arguments, which returns what ``on`` returns."""
        given = {f.name: "=()" if f.many else "" for f in (*self.args, *self.keys) if f.many or f in self.args}
        keys, constant = [], []
        for field in self.keys:
            rest = field.form.removeprefix(_BASE)
            words = _WORD.findall(rest)
            if field.many:
                keys.append(f"*{field.name}")
            elif field.name in fixed:
                keys.append(field.name)
            elif missing := [word for word in words if word.lower() not in given]:
                raise ValueError(f"lua/{self.name}.lua: key {field.name} needs an argument {missing[0].lower()}")
            elif words:
                keys.append("f'{_base}" + _WORD.sub(lambda word: f"{{{word[0].lower()}}}", rest) + "'")
            else:
                constant.append(f"    _{field.name} = _base + {rest!r}\n")
                keys.append(f"_{field.name}")
        flags = [field.name for field in self.args if field.form == "flag"]
        args = [f"'1' if {f.name} else '0'" if f.name in flags else f.name for f in self.args if not f.many]
        lists = [[field.name for field in fields if field.many] for fields in (self.keys, self.args)]
        counted = [name for names in lists for name in names[:-1]]
        if counted:
            args.append("f'" + " ".join(f"{{len({name})}}" for name in counted) + "'")
        args += [f"*{name}" for name in lists[1]]
        free = ", ".join(name + default for name, default in given.items() if name not in fixed)
        text = (
            f"def make({', '.join(('_script', '_base', *fixed))}):\n{''.join(constant)}"
            f"    def call({'*, ' if free else ''}{free}):\n"
            f"        return _script, ({', '.join(keys)},), ({', '.join(args)},)\n"
            "    return call\n"
        )
        made: dict[str, Any] = {}
        # All names in it are from our own files.
        exec(compile(text, f"lua/{self.name}.lua", "exec"), made)  # noqa: S102
        return cast("Callable[..., Any]", made["make"])


def folder() -> Path:
    """Returns the folder that holds the scripts.

    Raises:
        FileNotFoundError: the installation has no scripts.
    """
    for place in _PLACES:
        if (place / "apply.lua").is_file():
            return place
    raise FileNotFoundError(
        f"found no Lua scripts in {' or '.join(map(str, _PLACES))}: redisacc is not fully installed. Install it again"
    )


def names() -> list[str]:
    """Returns the names of all scripts, sorted."""
    return sorted(path.stem for path in folder().glob("*.lua"))


@cache
def load(name: str) -> Script:
    """Returns the script of this name, assembled: bindings and includes are in place.

    Raises:
        ValueError: the header can't be read.
    """

    def resolve_includes(text: str, included: set[str]) -> str:
        def include(match: re.Match[str]) -> str:
            # What a block includes is not there below the block.
            visible = set(included) if match[0].startswith(" ") else included
            texts = []
            for other in _INCLUDED.findall(match[0]):
                if other not in visible:
                    visible.add(other)
                    path = folder() / "include" / f"{other}.lua"
                    texts.append(resolve_includes(path.read_text(encoding="utf-8"), visible))
            return "".join(texts)

        return _INCLUDE.sub(include, text)

    text = (folder() / f"{name}.lua").read_text(encoding="utf-8")
    keys, args = parse_header(name, text)
    header = text.partition("\n\n")[0].partition("-- Replies:")[2]
    replies = {found["outcome"]: re.findall(r"[\w.]+", found["values"]) for found in _REPLY.finditer(header)}
    text, number = _BIND.subn(lambda _: _bindings(keys, args), text)
    if number != 1:
        raise ValueError(f"lua/{name}.lua has {number} lines '-- #bind', and needs exactly one below its header")
    return Script(name, resolve_includes(text, set()), keys, args, replies)


def parse_header(name: str, text: str) -> tuple[list[Field], list[Field]]:
    """Returns the fields of KEYS and of ARGV that the header of a script declares.

    Args:
        name: the name of the script, for messages.
        text: the script as it is in its file. The header ends at the first blank line.

    Raises:
        ValueError: a line isn't a declaration, or declares a name for the second time.
    """
    fields: dict[str, dict[str, Field]] = {"KEYS": {}, "ARGV": {}}
    for line in text.partition("\n\n")[0].splitlines():
        if not line.startswith(("-- KEYS", "-- ARGV")):
            continue
        match = _FIELD.fullmatch(line)
        types = _LIST_TYPES if match is not None and match["many"] else _TYPES
        if match is None or (match["table"] == "ARGV" and match["form"] not in types):
            raise ValueError(
                f"lua/{name}.lua: expected '-- KEYS name  pattern  meaning' or '-- ARGV name  type  meaning' with one "
                f"of the types {', '.join(types)}, not {line!r}"
            )
        declared = fields[match["table"]]
        if match["name"] in declared:
            raise ValueError(f"lua/{name}.lua declares {match['table']} {match['name']} twice")
        declared[match["name"]] = Field(match["name"], match["form"], match["many"] is not None)
    return list(fields["KEYS"].values()), list(fields["ARGV"].values())


def write(target: Path) -> None:
    """Writes the assembled scripts into a folder, for a linter or for reading."""
    target.mkdir(parents=True, exist_ok=True)
    for script in map(load, names()):
        (target / f"{script.name}.lua").write_text(script.text, encoding="utf-8")


def _bindings(keys: Sequence[Field], args: Sequence[Field]) -> str:
    """Returns the Lua lines that bind the names of a header to the values in KEYS and ARGV."""
    single_keys, single_args = ([field for field in fields if not field.many] for fields in (keys, args))
    key_lists, arg_lists = ([field for field in fields if field.many] for fields in (keys, args))
    has_lengths = len(key_lists) > 1 or len(arg_lists) > 1
    lines = ["-- Bound by the loader to the names of the header.", "local keys = {"]
    lines += [f"  {field.name} = KEYS[{number}]," for number, field in enumerate(single_keys, 1)]
    lines += ["}", "local args = {"]
    for number, field in enumerate(single_args, 1):
        lines.append(f"  {field.name} = {_TYPES[field.form].format(f'ARGV[{number}]')},")
    lines.append("}")
    of_keys = _list_bindings("keys", "KEYS", len(single_keys) + 1, key_lists)
    of_args = _list_bindings("args", "ARGV", len(single_args) + 1 + has_lengths, arg_lists)
    if has_lengths:
        # All lists of an inline gradient are empty.
        lines += [f"keys.{field.name} = {{}}" for field in key_lists]
        lines += [f"args.{field.name} = {{}}" for field in arg_lists]
        lines += [
            f"if #KEYS > {len(single_keys)} or #ARGV > {len(single_args) + 1} then",
            '  -- #include "list_reader"',
            f"  local length = string.gmatch(ARGV[{len(single_args) + 1}], '%d+')",
            *(f"  {line}" for line in of_keys + of_args),
            "end",
        ]
    else:
        lines += of_keys + of_args
    return "\n".join(lines) + "\n"


def _list_bindings(table: str, source: str, first: int, lists: Sequence[Field]) -> list[str]:
    """Returns the Lua lines that bind the names of lists to the values in KEYS or ARGV, from number ``first`` on."""
    if not lists:
        return []
    if len(lists) == 1:
        name = f"{table}.{lists[0].name}"
        value = f"tonumber({source}[n])" if lists[0].form == "number" else f"{source}[n]"
        return [f"{name} = {{}}", f"for n = {first}, #{source} do", f"  {name}[n - {first - 1}] = {value}", "end"]
    lines = [f"local next_{table} = list_reader({source}, {first})"]
    for field in lists:
        length = "nil" if field is lists[-1] else "length()"
        convert = _LIST_TYPES[field.form] if table == "args" else ""
        lines.append(f"{table}.{field.name} = next_{table}({length}{convert})")
    return lines
