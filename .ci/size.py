"""Counts how large the project is, and fails if a part is larger than its limit: `make size`.

Tokens are names, operators and literals, as Python 3.11 splits them. (Later versions split f-strings; here, each counts
as one literal with them, too.) Comments, docstrings, line breaks and indentation don't count. Code, tables and other
data in strings of several lines count by their content: each word and each sign is a token. Files of JSON, JavaScript,
CSS, HTML and shell scripts count in the same way, in a column of their own. A file of Lua counts by its lines that hold
more than a comment.

The limits hold what has been reached: a change that makes a part smaller lowers its limit.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {"redisacc/": 277_220, "redisacc/, other files": 17_100, "lua/": 1_679, "tests/": 459_950}

_COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
_FSTRING_START, _FSTRING_END = getattr(tokenize, "FSTRING_START", None), getattr(tokenize, "FSTRING_END", None)
_BREAKS = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
_SIGN = re.compile(r"\w+|[^\w\s]")
_PARTS = ("redisacc", "tests", "benchmarks", "examples", ".ci")
_LEFT_OUT = {("lua", "inspect"), ("benchmarks", "results")}
_OTHER = (".json", ".js", ".css", ".html", ".sh")


def tokens_of(text: str) -> int:
    """Returns how many tokens a Python file has."""
    number, is_first, depth = 0, True, 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in _BREAKS:
            is_first = True
        elif token.type == _FSTRING_START:
            number, is_first, depth = number + (depth == 0), False, depth + 1
        elif token.type == _FSTRING_END:
            depth -= 1
        elif token.type in _COUNTED and not depth:
            if token.type != tokenize.STRING:
                number += 1
            elif not (is_first and '"""' in token.string[:4]):
                # A docstring is a string that begins a statement.
                number += len(_SIGN.findall(token.string)) if "\n" in token.string else 1
            is_first = False
    return number


def lua_lines_of(text: str) -> int:
    """Returns how many lines of a Lua file hold more than a comment."""
    return sum(bool(line.strip()) and not line.lstrip().startswith("--") for line in text.splitlines())


def main() -> int:
    """Prints a table, and returns 1 if a part is above its limit."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    tokens, others, modules, lua = Counter[str](), Counter[str](), Counter[str](), 0
    for path in sorted(ROOT / name for name in listed.split("\0") if name):
        parts = path.relative_to(ROOT).parts
        if not path.is_file() or parts[:2] in _LEFT_OUT:
            continue
        if parts[0] == "lua" and path.suffix == ".lua":
            lua += lua_lines_of(path.read_text("utf-8"))
        if parts[0] not in _PARTS or path.suffix not in (".py", *_OTHER):
            continue
        for folder in (f"{parts[0]}/", f"  {parts[0]}/{parts[1] if len(parts) > 2 else '*'}"):
            if path.suffix == ".py":
                tokens[folder] += tokens_of(path.read_text("utf-8"))
                modules[folder] += 1
            else:
                others[folder] += len(_SIGN.findall(path.read_text("utf-8")))
    print(f"{'folder':<28}{'tokens':>10}{'modules':>9}{'other files':>13}")
    for part in _PARTS:
        inside = sorted((one for one in tokens if one.startswith(f"  {part}/")), key=lambda one: -tokens[one])
        for folder in (f"{part}/", *inside):
            print(f"{folder:<28}{tokens[folder]:>10,}{modules[folder]:>9}{others[folder]:>13,}")
    print(f"lua/ without lua/inspect/: {lua:,} lines of code")
    measured = {**tokens, "redisacc/, other files": others["redisacc/"], "lua/": lua}
    above = [part for part, limit in LIMITS.items() if measured[part] > limit]
    for part in above:
        print(f"{part}: {measured[part]:,} is above the limit of {LIMITS[part]:,} in .ci/size.py", file=sys.stderr)
    return bool(above)


if __name__ == "__main__":
    sys.exit(main())
