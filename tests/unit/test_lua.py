"""The Lua scripts: their headers, how the loader assembles them, and what Python passes and handles."""

import os
import re
import sysconfig
from pathlib import Path

import pytest
from support.rows import every_row

import redisacc
from redisacc._format.keys import Keys
from redisacc._protocol.scripts import COUNTED, OF_ACCUMULATORS, Scripts
from redisacc._wire import script_loader
from redisacc._wire.connect import connect

SCRIPTS = script_loader.names()
INSPECT = sorted(path.stem for path in (script_loader.folder() / "inspect").glob("*.lua"))

KEYS = Keys("NAME")


def file_text(name):
    return (script_loader.folder() / f"{name}.lua").read_text(encoding="utf-8")


def header(name):
    """The lines of a script's header, without the leading dashes."""
    return [line[2:] for line in file_text(name).partition("\n\n")[0].splitlines()]


def documented_replies(name):
    """The replies in a header: each its word, and the names of what follows."""
    text = "\n".join(header(name)).partition("Replies:")[2]
    return [re.findall(r"[\w]+", reply) for reply in re.findall(r"^ \{('[^}]*)\}", text, re.MULTILINE)]


def without_comments(text):
    return re.sub(r"(^|\s)--\s.*$", r"\1", text, flags=re.MULTILINE)


def split_functions(text):
    """The statements of a file, and its functions by name."""
    functions = {}

    def move(match):
        functions[match[1]] = match[0]
        return ""

    return re.sub(r"^local function (\w+)\(.*?^end$", move, text, flags=re.MULTILINE | re.DOTALL), functions


def reached_code(name):
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


def first_element(text):
    """The first element of the table that the text continues."""
    depth = 0
    for position, character in enumerate(text):
        if depth == 0 and character in ",}":
            return text[:position].strip()
        depth += {"(": 1, ")": -1}.get(character, 0)
    raise AssertionError(text)


def constructed_replies(name):
    """The words with which the replies begin that the code of a script can construct."""
    code = reached_code(name)
    words = set(re.findall(r"reply\[1\] = '(\w+)'", code))
    for match in re.finditer(r"\{", code):
        before, first = code[: match.start()], first_element(code[match.end() :])
        if _REPLY.search(before) and not re.match(r"\w+ = ", first):
            if first == "entry.outcome":
                # The first reply once more. A number belongs to one request: its reply is one of this script's own,
                # or resolve has fenced it. Only resolve asks for the requests of all scripts.
                words |= {"fenced"} | (COUNTED if name == "resolve" else set())
                # One request registers and then commits.
                words |= {"applied"} if name == "register" else set()
            else:
                found = re.findall(r"'(\w+)'", first)
                assert found, f"a reply whose word this test can't find: {first}"
                words.update(found)
        elif re.match(r"'\w+'", first):
            assert _LIST.search(before), f"neither a known list nor a reply: {before[-60:]}{{{first}"
    return words


def called(name, **changed):
    """What is sent for a script whose arguments have their names, and whose lists have two items."""
    script = script_loader.load(name)
    values = {field.name: field.name for field in script.args if not field.many}
    values |= {
        field.name: [f"{field.name} {n}" for n in range(2)] for field in (*script.keys, *script.args) if field.many
    }
    return script.on(KEYS.base)(**{**values, **changed})


def test_assembled_scripts_have_no_directive_left():
    loaded = {name: script_loader.load(name) for name in SCRIPTS}
    assert [name for name, script in loaded.items() if re.search("#include|#bind", script.text)] == []
    assert {len(script.sha) for script in loaded.values()} == {40}


def test_a_header_is_one_sentence_keys_arguments_and_replies():
    for name in [*SCRIPTS, *(f"inspect/{name}" for name in INSPECT)]:
        shape = (
            r" [A-Z][^.]*(?:\w\.\w[^.]*)*\.\n\n"
            r"( KEYS .*\n( {4,}.*\n)*)+"
            rf"( ARGV .*\n( {{4,}}.*\n)*){'*' if name == 'inspect/summary' else '+'}"
            + (r"\n Replies: [^}]*" if name.startswith("inspect/") else r"\n Replies:\n( \{'[^}]*\}.*\n( {4,}.*\n)*)+")
        )
        assert re.fullmatch(shape, "\n".join(header(name)) + "\n"), name


def test_every_name_of_a_header_is_used_and_every_used_name_is_in_the_header():
    for name in SCRIPTS:
        script, code = script_loader.load(name), reached_code(name)
        assert {field.name for field in script.keys} == set(re.findall(r"\bkeys\.(\w+)", code)), name
        # The include functions that get the arguments call them the request.
        assert {field.name for field in script.args} == set(re.findall(r"\b(?:args|request)\.(\w+)", code)), name
        assert not re.search(r"\b(?:KEYS|ARGV)\b", code), name


def test_a_script_without_the_loader_binds_its_header_itself():
    for name in INSPECT:
        keys, args = script_loader.parse_header(name, file_text(f"inspect/{name}"))
        _, _, code = file_text(f"inspect/{name}").partition("\n\n")
        for table, fields in (("KEYS", keys), ("ARGV", args)):
            found = [int(number) for number in re.findall(rf"{table}\[(\d+)\]", code)]
            assert found == list(range(1, len(fields) + 1)), name
        assert [field.form for field in keys] == [KEYS.record]


def test_keys_follow_from_the_patterns_of_the_header():
    for name in SCRIPTS:
        script, keys, _ = called(name)
        for field, key in zip((field for field in script.keys if not field.many), keys, strict=False):
            assert re.fullmatch(re.sub(r"\b[A-Z]+\b", r"[A-Za-z_]+", re.escape(field.form)), key), (name, field, key)
            assert "{NAME}" in key


@pytest.mark.slow
def test_a_header_documents_the_replies_that_the_script_constructs():
    for name in SCRIPTS:
        assert sorted(word for word, *_ in documented_replies(name)) == sorted(constructed_replies(name)), name


def test_a_documented_reply_has_its_values_by_name_or_is_an_error_and_others_are_errors():
    scripts = Scripts(None, KEYS, OF_ACCUMULATORS)
    for name in SCRIPTS:
        for word, *following in documented_replies(name):
            try:
                found = scripts.parse(name, [word.encode(), *[b"1"] * len(following)], round_shape="[2]")
            except redisacc.RedisAccError:
                assert word in OF_ACCUMULATORS, name
            else:
                assert (found.outcome, found.__dict__.keys() >= set(following)) == (word, True), name
        for reply in ([b"nonsense"], [b"nonsense", b"1", b"1"], [b"missing", b"1", b"1", b"1"]):
            with pytest.raises(redisacc.CorruptDataError, match="a script gave the unexpected reply"):
                pytest.fail(f"{name} may reply {reply}: {Scripts(None, KEYS).parse(name, reply)}")


@every_row("value", [b"x", b"-1", b"1" * 16, b"", b"9" * 20])
def test_a_value_that_is_no_number_is_an_error_that_names_it(value):
    with pytest.raises(redisacc.CorruptDataError, match="num_accumulated"):
        Scripts(None, KEYS).parse("apply", [b"applied", b"1", value])


def test_a_missing_or_an_unknown_argument_is_an_error():
    for name in SCRIPTS:
        with pytest.raises(TypeError, match=r"missing .* required keyword-only argument"):
            script_loader.load(name).on(KEYS.base)()
        with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
            called(name, other="x")


@every_row(
    "line, message",
    [
        ("-- KEYS record", "expected '-- KEYS name  pattern  meaning'"),
        ("-- KEYS[1] redisacc:{NAME}", "expected '-- KEYS name"),
        ("-- ARGV worker  string  its name", "one of the types text, bytes, int64, number, number\\?, flag, not"),
        ("-- ARGV limits...  number?  some", "one of the types text, bytes, int64, number, not"),
        ("-- ARGV taker  text\n-- ARGV taker  text", "declares ARGV taker twice"),
    ],
)
def test_a_header_that_cannot_be_read_is_an_error(line, message):
    with pytest.raises(ValueError, match=message):
        script_loader.parse_header("x", f"-- A sentence.\n--\n{line}\n\n-- ARGV below the header\n")


@every_row("body, number", [("", 0), ("-- #bind\n-- #bind\n", 2)])
def test_a_script_binds_once(monkeypatch, tmp_path, body, number):
    (tmp_path / "apply.lua").write_text(f"-- A sentence.\n\n{body}return {{}}\n")
    monkeypatch.setattr(script_loader, "_PLACES", (tmp_path,))
    with pytest.raises(ValueError, match=f"has {number} lines '-- #bind'"):
        script_loader.load.__wrapped__("apply")


def test_an_include_in_a_block_ends_with_the_block(monkeypatch, tmp_path):
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


def test_a_list_may_be_longer_than_the_stack_of_lua(client):
    accumulator = redisacc.ConditionalAccumulator("float32", [2], "NAME", redis=client)
    scripts = Scripts(connect(client), KEYS, incarnation=accumulator.info().incarnation)

    def remove(number, owner):
        garbage = [KEYS.part("ID", part) for part in range(number)]
        return scripts.remove_orphans(garbage=garbage, owners=[owner(part) for part in range(number)]).number

    # None is removed, because the record is there.
    assert remove(9_000, lambda _: "record") == 0
    client.set(KEYS.part("ID", 0), b"x")
    assert remove(3, lambda part: f"part {part}") == 1


def test_scripts_of_a_wheel_come_out_of_the_wheel():
    """`make wheel` sets the variable, and runs away from the checkout."""
    if os.environ.get("REDISACC_TEST_INSTALLED"):
        assert script_loader.folder().is_relative_to(Path(sysconfig.get_path("purelib")).resolve())
    else:
        assert (script_loader.folder().parent / "pyproject.toml").is_file()


def test_no_scripts_is_an_error_that_names_both_places(monkeypatch, tmp_path):
    monkeypatch.setattr(script_loader, "_PLACES", (tmp_path / "a", tmp_path / "b"))
    with pytest.raises(FileNotFoundError, match=r"a or .*b: redisacc is not fully installed\. Install it again"):
        script_loader.folder()
