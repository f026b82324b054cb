"""The Lua scripts: their headers, how the loader assembles them, and what Python passes and handles."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
import redis
from redisacc._protocol.scripts.accumulators import Scripts
from redisacc._protocol.scripts.attempts import AttemptScripts
from redisacc._protocol.scripts.base import StaleSequenceError
from redisacc._protocol.scripts.crews import CrewScripts
from redisacc._protocol.scripts.opening import Schema
from redisacc._protocol.scripts.parameters import Follows, ParameterScripts
from redisacc._protocol.scripts.partitions import PartitionScripts, Replaced
from redisacc._protocol.scripts.reducers import ReducerScripts
from redisacc._protocol.scripts.requests import GradientRequest, Request
from redisacc._protocol.scripts.updates import EndedRound, UpdateScripts

import redisacc
from redisacc._format.attempts import StoredAttempt
from redisacc._format.in_place import PackedRows
from redisacc._format.keys import Keys, ParameterKeys
from redisacc._format.quorum import quorum_change
from redisacc._format.record import FORMAT
from redisacc._protocol import scripts
from redisacc._protocol.scripts import requests
from redisacc._protocol.scripts.sessions import Session
from redisacc._protocol.scripts.take_requirement import TakeRequirement
from redisacc._redis import script_loader
from redisacc._redis.connect import connect
from redisacc._redis.script_loader import Script

SCRIPTS = script_loader.names()
INSPECT = sorted(path.stem for path in (script_loader.folder() / "inspect").glob("*.lua"))

KEYS = Keys("NAME")
PARAMETERS = ParameterKeys("NAME")
SESSION = Session(0)
REQUEST = GradientRequest(SESSION, 1, "w", 0, (2,))
FOLLOWS = Follows("x", "", 1)
REPLACED = Replaced(("a", "b"), (StoredAttempt("b", 1),), 4)

# A call of each script. The tokens and ids are the placeholders of the headers.
CALLS: dict[str, Callable[[Any], Any]] = {
    "acknowledge": lambda s: s.acknowledge(
        token="TOKEN", parts=[KEYS.part("ID", 0)], attempts=["ID-1 2"], metrics="loss=0.5", more=False
    ),
    "apply": lambda s: s.apply(REQUEST, [PackedRows("", "f", "", "8", b"0", b"12345678")]),
    "buffer": lambda s: s.buffer(
        REQUEST,
        gradient="ID",
        header=b"h",
        data=b"",
        lengths=[4, 4],
        stage=[],
        replaced=["a", "b", "c"],
        replaced_parts=[KEYS.part("ID", 7)],
    ),
    "commit": lambda s: s.commit(REQUEST, gradient="ID", place="1", header=b"h", parts=2, nbytes=8, replaced=REPLACED),
    "set_quorum": lambda s: s.set_quorum(REQUEST, quorum_change(1, ..., None)),
    "delete": lambda s: s.delete(finish=True),
    "forget_worker": lambda s: s.forget_worker(session="0-1", worker="w"),
    "leave": lambda s: s.leave(token="TOKEN"),
    "open": lambda s: s.open(
        incarnation="x",
        schema=Schema(FORMAT, "dense", "float32", "[2]", "SUM", "index", "zero", ""),
        chunk=1,
        lease_ms=0,
        buffer_limit=0,
        once_per_worker=False,
        max_staleness=0,
    ),
    "amend": lambda s: s.amend(incarnation="x", event="e", fields=["a", "b"]),
    "give_up": lambda s: s.give_up(incarnation="x", version="v"),
    "claim": lambda s: s.claim(place="worker 0", incarnation="x", step=1),
    "hold_lease": lambda s: s.hold_lease(place="worker 0", holder="h", process="p", who="w", lease_ms=1),
    "release_lease": lambda s: s.release_lease(place="worker 0", holder="h", process="p"),
    "hold_reducer": lambda s: s.hold_reducer(holder="h", who="w", stored=1, late=0, sums="", lease_ms=1),
    "release_reducer": lambda s: s.release_reducer(holder="h"),
    "publish": lambda s: s.publish(
        FOLLOWS,
        version="v",
        event="e",
        fields=["a", "b"],
        past="0 1 loss=0.5",
        parts={PARAMETERS.part("BLOB", 0): 4},
        unused=[PARAMETERS.part("BLOB", 7)],
        registered=True,
        blobs=[StoredAttempt("v-1-full", 2)],
        retired=[StoredAttempt("a-full", 2)],
        removed=[StoredAttempt("b-full", 2)],
    ),
    "register_update": lambda s: s.register_update(
        FOLLOWS, version="v-1", number=1, order="o", lease_ms=1, blobs=[StoredAttempt("v-1-flat", 2)]
    ),
    "commit_update": lambda s: s.commit_update(
        FOLLOWS,
        EndedRound("TOKEN", [KEYS.part("ID", 0)], [StoredAttempt("ID-1", 2)]),
        version="v",
        event="e",
        fields=["a", "b"],
        past="0 1 loss=0.5",
        parts={PARAMETERS.part("BLOB", 0): 4},
        unused=[PARAMETERS.part("BLOB", 7)],
        blobs=[StoredAttempt("v-1-flat", 2)],
        retired=[StoredAttempt("a-flat", 2)],
        removed=[StoredAttempt("b-flat", 2)],
    ),
    "register_version": lambda s: s.register_version(
        FOLLOWS, version="v", partitions="0,1", lease_ms=1, blobs=["full 2"]
    ),
    "recover": lambda s: s.recover(old="OLD", token="TOKEN", taker="w"),
    "register": lambda s: s.register(REQUEST, gradient="ID", parts=2, nbytes=8, lease_ms=1, replaced=REPLACED),
    "renew_upload": lambda s: s.renew_upload(
        REQUEST, attempt="ID-1 2", lease_ms=1, staged=[KEYS.staged("ID", 0)], message="m"
    ),
    "resolve": lambda s: s.resolve(Request(SESSION, 1, "w")),
    "set_global_step": lambda s: s.set_global_step(Request(SESSION, 1, "w"), 1),
    "remove_orphans": lambda s: s.remove_orphans(owners={KEYS.part("ID", 0): "part ID"}),
    "stage": lambda s: s.stage(REQUEST, gradient="ID", header=b"h"),
    "sweep": lambda s: s.sweep(limit=1, abandoned=[StoredAttempt("a", 1)], removed=[StoredAttempt("b", 1)]),
    "take": lambda s: s.take(
        token="TOKEN", session=SESSION, sequence=1, required=TakeRequirement(1, 1), lease_ms=1, taker="w"
    )(),
}

# Nobody reads the replies of the others: they only save time, so they travel ahead of another script, and may fail.
READ = [name for name in SCRIPTS if name != "stage"]


def file_text(name: str) -> str:
    return (script_loader.folder() / f"{name}.lua").read_text(encoding="utf-8")


def header(name: str) -> list[str]:
    """The lines of a script's header, without the leading dashes."""
    return [line[2:] for line in file_text(name).partition("\n\n")[0].splitlines()]


def documented_replies(name: str) -> list[list[str]]:
    """The replies in a header: each its word, and the names of what follows."""
    text = "\n".join(header(name)).partition("Replies:")[2]
    return [re.findall(r"[\w]+", reply) for reply in re.findall(r"^ \{('[^}]*)\}", text, re.MULTILINE)]


def without_comments(text: str) -> str:
    return re.sub(r"(^|\s)--\s.*$", r"\1", text, flags=re.MULTILINE)


def split_functions(text: str) -> tuple[str, dict[str, str]]:
    """The statements of a file, and its functions by name."""
    functions = {}

    def move(match: re.Match[str]) -> str:
        functions[match[1]] = match[0]
        return ""

    return re.sub(r"^local function (\w+)\(.*?^end$", move, text, flags=re.MULTILINE | re.DOTALL), functions


def reached_code(name: str) -> str:
    """The code that can run in a script: its statements, and every function that these call, also by way of others."""
    included = {}
    for path in (script_loader.folder() / "include").glob("*.lua"):
        included.update(split_functions(without_comments(path.read_text(encoding="utf-8")))[1])
    code, own = split_functions(without_comments(file_text(name).partition("\n\n")[2]))
    waiting = {**included, **own}
    while called := [function for function in waiting if re.search(rf"\b{function}\(", code)]:
        code += "".join(waiting.pop(function) for function in called)
    return code


# A table after one of these is a reply, if its elements have no names.
_REPLY = re.compile(r"(?:return|return nil,|refuse\(|reply =) ?$")
# A table after one of these lists fields of the record, or is a reply to be stored and not returned.
_LIST = re.compile(r"(?:(?:NAMES|names) =|\b(?:read_record|read_more|admit|write_session)\([^{()]*) ?\s*$")


def first_element(text: str) -> str:
    """The first element of the table that the text continues."""
    depth = 0
    for position, character in enumerate(text):
        if depth == 0 and character in ",}":
            return text[:position].strip()
        depth += {"(": 1, ")": -1}.get(character, 0)
    raise AssertionError(text)


def constructed_replies(name: str) -> set[str]:
    """The words with which the replies begin that the code of a script can construct."""
    code = reached_code(name)
    words = set()
    for match in re.finditer(r"\{", code):
        before, first = code[: match.start()], first_element(code[match.end() :])
        if _REPLY.search(before) and not re.match(r"\w+ = ", first):
            if first == "entry.outcome":
                # The first reply once more. A number belongs to one request: its reply is one of this script's own,
                # or resolve has fenced it. Only resolve asks for the requests of all scripts.
                words |= {"fenced"} | (scripts_outcomes() if name == "resolve" else set())
                # One request registers and then commits.
                words |= {"applied"} if name == "register" else set()
            else:
                found = re.findall(r"'(\w+)'", first)
                assert found, f"a reply whose word this test can't find: {first}"
                words.update(found)
        elif re.match(r"'\w+'", first):
            assert _LIST.search(before), f"neither a known list nor a reply: {before[-60:]}{{{first}"
    return words


def scripts_outcomes() -> set[str]:
    return {word.decode() for word in requests._OUTCOMES}


class Replaying:
    """A transport with given replies."""

    def __init__(self, *reply: bytes) -> None:
        self._reply = list(reply)

    def run(self, script: Script, keys: Any, args: Any, **options: Any) -> list[bytes]:
        return self._reply

    def run_and_read(self, script: Script, keys: Any, args: Any, **options: Any) -> tuple[list[bytes], list[Any]]:
        return self._reply, []

    def prepare(self, script: Script, keys: Any, args: Any, **options: Any) -> None:
        return None

    def repeat(self, call: None, **options: Any) -> tuple[list[bytes], list[Any]]:
        return self._reply, []


def replayed(name: str, *reply: bytes) -> Any:
    """Returns the result of the Python function for a reply of its script."""
    if hasattr(CrewScripts, name):
        return CALLS[name](CrewScripts(Replaying(*reply), KEYS))  # type: ignore[arg-type]
    if hasattr(ReducerScripts, name):
        return CALLS[name](ReducerScripts(Replaying(*reply), KEYS, None))  # type: ignore[arg-type]
    if hasattr(AttemptScripts, name):
        return CALLS[name](AttemptScripts(Replaying(*reply), KEYS))  # type: ignore[arg-type]
    if hasattr(UpdateScripts, name) and not hasattr(ParameterScripts, name):
        return CALLS[name](UpdateScripts(Replaying(*reply), PARAMETERS, KEYS))  # type: ignore[arg-type]
    if hasattr(ParameterScripts, name) and not hasattr(Scripts, name):
        return CALLS[name](ParameterScripts(Replaying(*reply), PARAMETERS))  # type: ignore[arg-type]
    return CALLS[name](PartitionScripts(Replaying(*reply), KEYS, incarnation="x"))  # type: ignore[arg-type]


def test_every_script_is_a_function_and_every_function_a_script() -> None:
    functions = {
        name
        for kind in (Scripts, PartitionScripts, AttemptScripts, UpdateScripts, CrewScripts, ReducerScripts)
        for name, value in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and name != "bind"
    }
    assert functions == set(SCRIPTS) == set(CALLS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_assembled_scripts_have_no_directive_left(name: str) -> None:
    text = script_loader.load(name).text
    assert "#include" not in text
    assert "#bind" not in text
    assert len(script_loader.load(name).sha) == 40


@pytest.mark.parametrize("name", [*SCRIPTS, *(f"inspect/{name}" for name in INSPECT)])
def test_a_header_is_one_sentence_keys_arguments_and_replies(name: str) -> None:
    shape = (
        r" [A-Z][^.]*(?:\w\.\w[^.]*)*\.\n\n"
        r"( KEYS .*\n( {4,}.*\n)*)+"
        + (r"( ARGV .*\n( {4,}.*\n)*)*" if name == "inspect/summary" else r"( ARGV .*\n( {4,}.*\n)*)+")
        + (r"\n Replies: [^}]*" if name.startswith("inspect/") else r"\n Replies:\n( \{'[^}]*\}.*\n( {4,}.*\n)*)+")
    )
    assert re.fullmatch(shape, "\n".join(header(name)) + "\n")


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_name_of_a_header_is_used_and_every_used_name_is_in_the_header(name: str) -> None:
    script, code = script_loader.load(name), reached_code(name)
    assert {field.name for field in script.keys} == set(re.findall(r"\bkeys\.(\w+)", code))
    # The include functions that get the arguments call them the request.
    assert {field.name for field in script.args} == set(re.findall(r"\b(?:args|request)\.(\w+)", code))
    assert not re.search(r"\b(?:KEYS|ARGV)\b", code)


@pytest.mark.parametrize("name", INSPECT)
def test_a_script_without_the_loader_binds_its_header_itself(name: str) -> None:
    keys, args = script_loader.parse_header(name, file_text(f"inspect/{name}"))
    _, _, code = file_text(f"inspect/{name}").partition("\n\n")
    for table, fields in (("KEYS", keys), ("ARGV", args)):
        assert [int(number) for number in re.findall(rf"{table}\[(\d+)\]", code)] == list(range(1, len(fields) + 1))
    assert [field.form for field in keys] == [KEYS.record]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_keys_that_python_passes_are_those_of_the_header(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passed = {}
    bind = Script.bind

    def watch(self: Script, *, keys: Any, args: Any) -> Any:
        passed.update(keys)
        return bind(self, keys=keys, args=args)

    monkeypatch.setattr(Script, "bind", watch)
    with contextlib.suppress(redisacc.CorruptDataError):
        replayed(name, b"nonsense")
    fields = {field.name: field for field in script_loader.load(name).keys}
    assert passed.keys() == fields.keys()
    for key, value in passed.items():
        pattern = re.escape(fields[key].form).replace(r"\*", ".+").replace(":K", r":\d+")
        values = value if fields[key].many else [value]
        # The sum of several gradients takes the place of the oldest. Deleting an accumulator leaves no mark.
        assert values or (name, key) in (("buffer", "place"), ("delete", "marks"))
        for each in values:
            assert re.fullmatch(pattern, each), (key, each)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_header_documents_the_replies_that_the_script_constructs(name: str) -> None:
    words = [word for word, *_ in documented_replies(name)]
    assert sorted(words) == sorted(constructed_replies(name))


@pytest.mark.parametrize(("name", "reply"), [(name, reply) for name in READ for reply in documented_replies(name)])
def test_python_handles_every_documented_reply(name: str, reply: list[str]) -> None:
    word, *following = reply
    values = {"round_shape": b"[2]", "struct": b"yes"}
    said = ""
    try:
        replayed(name, word.encode(), *(values.get(value, b"1") for value in following))
    except redisacc.RedisAccError as error:
        said = str(error)
    assert "a script replied" not in said


@pytest.mark.parametrize("name", READ)
def test_python_refuses_other_replies(name: str) -> None:
    for reply in ([b"nonsense"], [b"nonsense", b"1", b"1"], [b"missing", b"1", b"1", b"1"]):
        with pytest.raises(redisacc.CorruptDataError, match="a script gave the unexpected reply"):
            replayed(name, *reply)


def test_python_handles_no_reply_that_no_header_documents() -> None:
    modules = (importlib.import_module(f"{scripts.__name__}.{found.name}") for found in iter_modules(scripts.__path__))
    source = "".join(map(inspect.getsource, modules))
    handled = set(re.findall(r'b"(\w+)"', source)) - {"yes"}
    documented = {word for name in READ for word, *_ in documented_replies(name)}
    assert handled | scripts_outcomes() == documented


def test_a_fenced_request_is_over() -> None:
    with pytest.raises(StaleSequenceError, match="resolved as not executed"):
        replayed("apply", b"fenced", b"1", b"1")
    assert replayed("resolve", b"fenced", b"1", b"1") is None


def test_names_are_bound_in_the_order_of_the_header() -> None:
    script = script_loader.load("buffer")
    keys: dict[str, Any] = {field.name: f"key {field.name}" for field in script.keys if not field.many}
    args: dict[str, Any] = {field.name: field.name for field in script.args if not field.many}
    keys |= {"staged": ["s0", "s1"], "parts": ["p0", "p1"], "place": [], "replaced_parts": []}
    args |= {"lengths": [3, 4], "replaced": ["r"]}
    bound, in_keys, in_args = script.bind(keys=dict(reversed(keys.items())), args=dict(reversed(args.items())))
    assert bound is script
    assert [*in_keys] == [*list(keys.values())[:5], "s0", "s1", "p0", "p1"]
    assert [*in_args] == [*list(args.values())[:16], "2 0 2 2", 3, 4, "r"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_missing_or_an_unknown_name_is_an_error(name: str) -> None:
    script = script_loader.load(name)
    keys: dict[str, Any] = {field.name: "k" for field in script.keys}
    args: dict[str, Any] = {field.name: "a" for field in script.args}
    script.bind(keys=keys, args=args)
    for table, given, passed in (
        ("KEYS", keys, lambda values: {"keys": values, "args": args}),
        ("ARGV", args, lambda values: {"keys": keys, "args": values}),
    ):
        for field in given:
            fewer = {other: value for other, value in given.items() if other != field}
            with pytest.raises(TypeError, match=rf"lua/{name}\.lua: {table} {field} is missing$"):
                script.bind(**passed(fewer))
            with pytest.raises(TypeError, match=rf"{table} {field} is missing, {table} other is not in the header$"):
                script.bind(**passed({**fewer, "other": "x"}))
        with pytest.raises(TypeError, match=rf"lua/{name}\.lua: {table} other is not in the header$"):
            script.bind(**passed({**given, "other": "x"}))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-- KEYS record", "expected '-- KEYS name  pattern  meaning'"),
        ("-- KEYS[1] redisacc:{NAME}", "expected '-- KEYS name"),
        ("-- ARGV worker  string  its name", "one of the types text, bytes, int64, number, number\\?, flag, not"),
        ("-- ARGV limits...  number?  some", "one of the types text, bytes, int64, number, not"),
        ("-- ARGV taker  text\n-- ARGV taker  text", "declares ARGV taker twice"),
    ],
)
def test_a_header_that_cannot_be_read_is_an_error(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        script_loader.parse_header("x", f"-- A sentence.\n--\n{line}\n\n-- ARGV below the header\n")


@pytest.mark.parametrize(("body", "number"), [("", 0), ("-- #bind\n-- #bind\n", 2)])
def test_a_script_binds_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, number: int) -> None:
    (tmp_path / "apply.lua").write_text(f"-- A sentence.\n\n{body}return {{}}\n")
    monkeypatch.setattr(script_loader, "_PLACES", (tmp_path,))
    with pytest.raises(ValueError, match=f"has {number} lines '-- #bind'"):
        script_loader.load.__wrapped__("apply")


def test_an_include_in_a_block_ends_with_the_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    includes = {"a": "in a", "b": '-- #include "a"\nin b', "c": '-- #include "a"\nin c'}
    (tmp_path / "include").mkdir()
    for name, text in includes.items():
        (tmp_path / "include" / f"{name}.lua").write_text(f"{text}\n")
    block = 'if x then\n  -- #include "b"\n  -- #include "c"\nend\n'
    (tmp_path / "apply.lua").write_text(f'-- A sentence.\n\n-- #bind\n{block}-- #include "c"\n{block}')
    monkeypatch.setattr(script_loader, "_PLACES", (tmp_path,))
    text = script_loader.load.__wrapped__("apply").text
    # Within a block, nothing comes twice; below it, nothing of it is there; what is at the top level is in all blocks.
    assert re.findall(r"in (.)|^(if|end)", text, re.MULTILINE) == [
        *[("", "if"), ("a", ""), ("b", ""), ("c", ""), ("", "end")],
        *[("a", ""), ("c", "")],
        *[("", "if"), ("b", ""), ("", "end")],
    ]


def test_a_list_may_be_longer_than_the_stack_of_lua(client: redis.Redis) -> None:
    accumulator = redisacc.ConditionalAccumulator("float32", [2], "NAME", redis=client)
    scripts = Scripts(connect(client), KEYS, incarnation=accumulator.info().incarnation)
    # None is removed, because the record is there.
    assert scripts.remove_orphans(owners={KEYS.part("ID", part): "record" for part in range(9_000)}) == 0
    client.set(KEYS.part("ID", 0), b"x")
    assert scripts.remove_orphans(owners={KEYS.part("ID", part): f"part {part}" for part in range(3)}) == 1


def test_scripts_of_a_wheel_come_out_of_the_wheel() -> None:
    """`make wheel` sets the variable, and runs away from the checkout."""
    if os.environ.get("REDISACC_TEST_INSTALLED"):
        assert script_loader.folder().is_relative_to(Path(sysconfig.get_path("purelib")).resolve())
    else:
        assert (script_loader.folder().parent / "pyproject.toml").is_file()


def test_no_scripts_is_an_error_that_names_both_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script_loader, "_PLACES", (tmp_path / "a", tmp_path / "b"))
    with pytest.raises(FileNotFoundError, match=r"a or .*b: redisacc is not fully installed\. Install it again"):
        script_loader.folder()
