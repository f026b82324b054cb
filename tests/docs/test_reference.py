"""The reference pages and the protocol page are complete: every key, every script, every folder, every term once."""

import re
import runpy

import pytest
from pages import DOCS
from support.rows import every_row

from redisacc import __all__ as ours
from redisacc import embedded, errors, optim
from redisacc._format.keys import NAMES, Keys, ParameterKeys
from redisacc._format.record import FIELDS
from redisacc.tools.cli import COMMANDS

ROOT = DOCS.parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DOCS.is_dir(), reason="the documentation isn't part of an installation"),
]


def _keys():
    """Every key and channel of an accumulator and of parameters, without and with partitions."""
    found = {NAMES}
    for partitions in ((), (7,)):
        keys, parameters = Keys("NAME", partitions), ParameterKeys("NAME", partitions)
        position = 0 if partitions else None
        for owner in (keys, parameters):
            found |= {
                value for value in vars(owner).values() if isinstance(value, str) and value.startswith("redisacc:")
            }
        found |= set(keys.current.hashes) | {keys.compacting, keys.reducer(position), keys.wake_of(position)}
        found |= {keys.part("ID", 0), keys.place("ID"), keys.taken_round("TOKEN").sums}
        found |= {keys.sum("DIGEST", 0), keys.squares("DIGEST", 0)}
        found |= {parameters.part("BLOB", 0), parameters.updated_of(0)}
    # A key that never exists.
    return found - {ParameterKeys("NAME").guard}


@every_row("key", sorted(_keys()))
def test_the_table_of_keys_has_each_key(key):
    shown = re.sub(r":0$", ":K", key).replace("/00007}", "/p}").replace("reducer:7", "reducer:p")
    table = (DOCS / "reference" / "keys.md").read_text().partition("## The record")[0]
    assert f"`{shown}`" in table


def test_the_page_of_keys_has_each_field_of_the_record():
    record = (DOCS / "reference" / "keys.md").read_text().partition("## The record\n")[2].partition("\n## ")[0]
    described = {name for row in re.findall(r"^\| (`.+?`) \|", record, re.MULTILINE) for name in row.split("`")[1::2]}
    assert {field.name for field in FIELDS} - described == set()


@every_row("script", sorted(path.stem for path in (ROOT / "lua").glob("*.lua")))
def test_the_protocol_page_has_each_script(script):
    table = (DOCS / "internals" / "protocol.md").read_text().partition("## Sessions")[0]
    assert f"`{script}`" in table


def _folders():
    package = ROOT / "redisacc"
    parents = (package, package / "_protocol")
    found = [folder for parent in parents for folder in parent.iterdir() if (folder / "__init__.py").is_file()]
    return sorted(f"{folder.relative_to(ROOT)}/" for folder in found)


@every_row("folder", _folders())
def test_contributing_has_each_folder(folder):
    assert f"| `{folder}` |" in (ROOT / "CONTRIBUTING.md").read_text()


@every_row("name", sorted({*ours, *optim.__all__, *embedded.__all__} - set(vars(errors))))
def test_the_api_reference_has_each_public_name(name):
    page = (DOCS / "reference" / "api.md").read_text()
    assert re.search(rf"(?:autoclass|autofunction|automodule):: .*\b{name}\b|:members: .*\b{name}\b", page)


def test_the_concepts_define_at_most_25_terms_in_order_and_each_once():
    page = (DOCS / "explanations" / "concepts.md").read_text().partition("\n## Terms\n")[2]
    entries = re.findall(r"^### (.+)\n\n(\S.+)$", page, re.MULTILINE)
    terms = runpy.run_path(str(DOCS / "terms.py"))["terms"]()
    assert [term for term, _ in entries] == sorted(terms)
    assert 1 <= len(entries) <= 25


@every_row(
    "text, found",
    [
        ("Workers acknowledge a round.", {"Worker", "Acknowledgment", "Round"}),
        ("It costs a round trip, step by step, in place of two.", set()),
        ("The server adds in place, and later compacts.", {"In place", "Compaction"}),
        ("the weights of the model", set()),
    ],
)
def test_terms_are_found_in_sentences(text, found):
    terms = runpy.run_path(str(DOCS / "terms.py"))["terms"]()
    assert {term for term, pattern in terms.items() if pattern.search(text)} == found


def test_the_page_of_options_is_what_the_commands_say():
    page = runpy.run_path(str(DOCS / "commands.py"))
    assert page["PAGE"].read_text() == page["text"](), "a command has changed: run docs/commands.py"


def test_the_page_of_the_command_has_each_command():
    page = (DOCS / "reference" / "command-line.md").read_text()
    assert {name for name in COMMANDS if f"[`{name}`](commands.md#{name})" not in page} == set()
