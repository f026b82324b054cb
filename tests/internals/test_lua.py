"""The scripts: found, assembled, and as their heads describe them."""

from __future__ import annotations

import inspect
import os
import re
import sysconfig
from pathlib import Path

import pytest

from redisacc import _lua
from redisacc._scripts import Scripts

SCRIPTS = _lua.names()


def head_and_code(name: str) -> tuple[str, str]:
    """The comment at the top of a script's own file, and the rest with the includes in place."""
    text = (_lua.folder() / f"{name}.lua").read_text()
    head, _, rest = text.partition("\n\n")
    included = "\n".join(
        head_free((_lua.folder() / "include" / f"{include}.lua").read_text())
        for include in re.findall(r'^-- #include "(\w+)"', _lua_with_includes(rest), re.MULTILINE)
    )
    return head, rest + included


def _lua_with_includes(text: str) -> str:
    """The include lines of a script and, below them, those of what it includes."""
    lines = re.findall(r'^-- #include "\w+"$', text, re.MULTILINE)
    for line in lines:
        include = re.findall(r'"(\w+)"', line)[0]
        lines += re.findall(
            r'^-- #include "\w+"$', (_lua.folder() / "include" / f"{include}.lua").read_text(), re.MULTILINE
        )
    return "\n".join(dict.fromkeys(lines))


def head_free(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith("--"))


def test_every_script_is_a_function_and_every_function_a_script() -> None:
    functions = {
        name for name, value in vars(Scripts).items() if inspect.isfunction(value) and not name.startswith("_")
    }
    assert functions == set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_assembled_scripts_have_no_include_left(name: str) -> None:
    assert "#include" not in _lua.load(name).text
    assert len(_lua.load(name).sha) == 40


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_head_begins_with_a_sentence(name: str) -> None:
    head, _ = head_and_code(name)
    assert re.match(r"-- [A-Z].*", head)
    for section in ("KEYS[1]", "ARGV[1]", "-- Replies:"):
        assert section in head


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("table", ["KEYS", "ARGV"])
def test_the_head_lists_what_the_code_binds(name: str, table: str) -> None:
    head, code = head_and_code(name)
    listed = [int(number) for number in re.findall(rf"^-- {table}\[(\d+)[\].]", head, re.MULTILINE)]
    assert listed == sorted(set(listed))
    used = {int(number) for number in re.findall(rf"{table}\[(\d+)\]", code)}
    if not re.search(rf"unpack\({table}|#{table}|{table}\[\w* ?[+a-z]", code):
        assert used == set(listed)
    # An open end ("KEYS[5..]") is read by a loop; what stands before it is named.
    assert used <= set(listed) | set(range(listed[-1], 100))


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_head_lists_every_reply(name: str) -> None:
    head, code = head_and_code(name)
    listed = set(re.findall(r"^-- \{'(\w+)'", head, re.MULTILINE))
    assert listed
    # Words that open a table constructor are replies, except for keys of a record.
    written = set(re.findall(r"(?:return (?:nil, )?|refuse\(|reply = )\{\s*'(\w+)'", code))
    written |= set(re.findall(r"and '(\w+)' or '(\w+)', step", code)[0]) if name == "set_global_step" else set()
    written |= set(re.findall(r"current == closed and '(\w+)' or", code))
    written |= set(re.findall(r"closed and '\w+' or '(\w+)'", code))
    # What an include can reply and this script passes on is listed, too.
    assert written - listed == set()
    assert listed - written == set()


def test_scripts_of_a_wheel_come_out_of_the_wheel() -> None:
    """`make wheel` sets the variable, and runs away from the checkout."""
    if os.environ.get("REDISACC_TEST_INSTALLED"):
        assert _lua.folder().is_relative_to(Path(sysconfig.get_path("purelib")).resolve())
    else:
        assert (_lua.folder().parent / "pyproject.toml").is_file()


def test_no_scripts_is_an_error_that_names_both_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_lua, "_PLACES", (tmp_path / "a", tmp_path / "b"))
    with pytest.raises(FileNotFoundError, match=r"a or .*b: redisacc is not fully installed"):
        _lua.folder()
