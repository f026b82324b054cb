"""Docstrings against the code: examples run, arguments, attributes and files that they mention exist."""

import ast
import doctest
import functools
import gc
import importlib
import inspect
import re
from pathlib import Path

import pytest
from pages import DOCS
from support.rows import every_row

import redisacc

PACKAGE = Path(redisacc.__file__).parent
MODULES = {
    ".".join(("redisacc", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def _examples():
    finder = doctest.DocTestFinder()
    for name, path in MODULES.items():
        # Most modules have none, and not every module may be imported without side effects.
        if re.search(r"^\s*>>> ", path.read_text(), re.MULTILINE):
            found = finder.find(importlib.import_module(name), name, globs={})
            yield from (example for example in found if example.examples)


EXAMPLES = list(_examples())


@pytest.mark.slow
@pytest.mark.servers("valkey")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example(example, real_server, monkeypatch):
    monkeypatch.setenv("REDISACC_URL", real_server.url or "")
    report = []
    result = doctest.DocTestRunner(verbose=False).run(example, out=report.append)
    # Handles that the example left open are closed while their server is there.
    gc.collect()
    assert result.failed == 0, "".join(report)


CLASSES = [name for name in redisacc.__all__ if inspect.isclass(getattr(redisacc, name))]


@every_row("name", ["raw_ops", "OutcomeUnknownError", *(name for name in CLASSES if not name.endswith("Error"))])
def test_has_an_example(name):
    assert any(example.name.split(".")[-1] == name for example in EXAMPLES)


# The lists in docstrings


def _entries(docstring, section):
    """The names that a section of a docstring describes, in its order; [] if there is no such section."""
    names = []
    inside = False
    for line in inspect.cleandoc(docstring).splitlines():
        if not line.startswith(" ") and line:
            inside = line == f"{section}:"
        elif inside and (match := re.match(r" {4}([*\w][\w, *]*):(?:\s|$)", line)):
            names += [name.strip(" *") for name in match[1].split(",")]
    return names


def _parameters(function):
    given = function.args
    every = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return [argument.arg for argument in every if argument is not None and argument.arg not in ("self", "cls")]


def _constructor_parameters(constructor):
    """Parameters of a constructor. ``**options: Unpack[X]`` stands for the fields of the typed dict X."""
    unpacked = re.search(r"\*\*options: Unpack\[(\w+)\]", ast.unparse(constructor.args))
    options = _keys(_classes()[unpacked[1]][1]) if unpacked else ["options"]
    return [name for given in _parameters(constructor) for name in (options if given == "options" else [given])]


def _keys(cls):
    """Returns the keys of a typed dict, with those of its bases."""
    return [key for base in _base_names(cls) if base in _classes() for key in _keys(_classes()[base][1])] + _fields(cls)


def _fields(cls):
    """Public attributes: fields of a dataclass or NamedTuple, and what methods assign to self."""
    found = [
        node.target.id
        for node in cls.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and "ClassVar" not in ast.dump(node)
    ]
    stored = (n for n in ast.walk(cls) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    found += [node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"]
    return [name for name in dict.fromkeys(found) if not name.startswith("_")]


def _properties(cls):
    return {
        node.name
        for node in cls.body
        if isinstance(node, ast.FunctionDef) and any("property" in ast.dump(d) for d in node.decorator_list)
    }


def _base_names(cls):
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in cls.bases]
    return [base.id for base in bases if isinstance(base, ast.Name)]


def _statements(node):
    """Like ast.walk, without looking into expressions, which takes seconds."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield child
            yield from _statements(child)


@functools.cache
def _nodes():
    return [(module, node) for module, path in MODULES.items() for node in _statements(ast.parse(path.read_text()))]


@functools.cache
def _classes():
    return {node.name: (module, node) for module, node in _nodes() if isinstance(node, ast.ClassDef)}


def _ancestors(cls):
    """The names of the package's classes that a class inherits from, at any distance."""
    known = [base for base in _base_names(cls) if base in _classes()]
    return known + [further for base in known for further in _ancestors(_classes()[base][1])]


def _faults(module, node):
    """Differences between what a docstring lists and what there is."""
    docstring = ast.get_docstring(node) or ""
    where = f"{module}.{node.name}"
    documented = _entries(docstring, "Args")
    faults = []
    if isinstance(node, ast.ClassDef):
        fields = _fields(node)
        constructors = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
        parameters = _constructor_parameters(constructors[0]) if constructors else fields
        described_there = {
            name
            for base in _ancestors(node)
            if base in docstring
            for name in _entries(ast.get_docstring(_classes()[base][1]) or "", "Args")
        }
        if attributes := _entries(docstring, "Attributes"):
            classes = [node, *(_classes()[base][1] for base in _ancestors(node))]
            there = {name for each in classes for name in (*_fields(each), *_properties(each))}
            faults += [f"{where} has no attribute {n}" for n in attributes if n not in there]
            faults += [f"{where}: attribute {n} is not described" for n in fields if n not in attributes]
    else:
        parameters, described_there = _parameters(node), set()
    if documented:
        faults += [f"{where} has no argument {n}" for n in documented if n not in parameters]
        missing = [n for n in parameters if n not in {*documented, *described_there}]
        faults += [f"{where}: argument {n} is not described" for n in missing]
    return faults


@pytest.mark.slow
def test_arguments_and_attributes_are_those_that_there_are():
    functions = [(module, node) for module, node in _nodes() if isinstance(node, Function)]
    assert len(_classes()) > 50
    assert [fault for module, node in [*_classes().values(), *functions] for fault in _faults(module, node)] == []


@pytest.mark.skipif(not DOCS.is_dir(), reason="the documentation isn't part of an installation")
def test_files_that_are_mentioned_exist():
    root = DOCS.parent
    sources = [*MODULES.values(), *sorted((root / "lua").rglob("*.lua"))]
    mentioned = [
        (source.name, file)
        for source in sources
        for file in re.findall(r"\b(?:docs|lua|tests|redisacc)/[\w/-]+\.(?:md|lua|py)\b", source.read_text())
    ]
    assert len(mentioned) > 10
    assert [(source, file) for source, file in mentioned if not (root / file).exists()] == []


def test_dense_and_sparse_gradients_raise_the_same_errors():
    """Their docstrings repeat each other, so that help() is complete, and must not drift apart."""
    dense, sparse = (
        inspect.getdoc(cls.apply_grad).partition("Raises:")[2].partition("NotFoundError")
        for cls in (redisacc.ConditionalAccumulator, redisacc.SparseConditionalAccumulator)
    )
    assert dense[1:] == sparse[1:] != ("", "")
