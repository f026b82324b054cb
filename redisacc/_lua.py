"""Finds the Lua scripts, puts their includes in, and hashes the result."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_HERE = Path(__file__).resolve().parent

# In a wheel the scripts lie inside the package; in a checkout (an editable install) at the top of the repository.
_PLACES = (_HERE / "lua", _HERE.parent / "lua")

_INCLUDE = re.compile(r'^-- #include "(\w+)"\n', re.MULTILINE)


@dataclass(frozen=True)
class Script:
    """A script as it goes to the server."""

    name: str
    text: str
    sha: str


def folder() -> Path:
    """The folder that holds the scripts."""
    for place in _PLACES:
        if (place / "apply.lua").is_file():
            return place
    raise FileNotFoundError(f"no Lua scripts in {' or '.join(map(str, _PLACES))}: redisacc is not fully installed")


def names() -> list[str]:
    """The names of all scripts."""
    return sorted(path.stem for path in folder().glob("*.lua"))


@cache
def load(name: str) -> Script:
    """The script of that name, with everything that it includes."""
    included: set[str] = set()

    def assemble(path: Path) -> str:
        def include(match: re.Match[str]) -> str:
            if match[1] in included:
                return ""
            included.add(match[1])
            return assemble(folder() / "include" / f"{match[1]}.lua")

        return _INCLUDE.sub(include, path.read_text(encoding="utf-8"))

    text = assemble(folder() / f"{name}.lua")
    # The hash is how Redis names scripts, not a safeguard.
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def write(target: Path) -> None:
    """Writes the assembled scripts into a folder, for a linter or for reading."""
    target.mkdir(parents=True, exist_ok=True)
    for script in map(load, names()):
        (target / f"{script.name}.lua").write_text(script.text, encoding="utf-8")
