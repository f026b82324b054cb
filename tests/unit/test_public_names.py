"""What the package exports."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from support.rows import every_row

import redisacc
from redisacc import data, errors, optim, raw_ops


@every_row("module", [redisacc, data, errors, optim, raw_ops])
def test_all_is_what_is_public(module):
    public = {
        name
        for name in dir(module)
        if not name.startswith("_")
        and (inspect.isclass(value := getattr(module, name)) or inspect.isfunction(value))
        and _ours(value, module)
    }
    modules = {"data", "errors", "optim", "raw_ops", "types"} if module is redisacc else set()
    assert set(module.__all__) == public | modules


def test_no_class_is_longer_than_600_lines():
    lengths = {
        f"{path.name}: {node.name}": node.end_lineno - node.lineno + 1
        for path in Path(redisacc.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    assert not {name: length for name, length in lengths.items() if length > 600}


def test_type_checkers_see_the_names_that_are_loaded_on_use():
    tree = ast.parse(Path(redisacc.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imported = {
        alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported == {**dict.fromkeys(redisacc._SUBMODULES, "redisacc"), **redisacc._MODULES}
    assert set(redisacc.__all__) == {"errors", *errors.__all__, *imported}


@every_row(
    "statement",
    [
        "import redisacc",
        "import redisacc.tools.cli; redisacc.tools.cli.main(['--help'], standalone_mode=False)",
    ],
)
def test_an_import_loads_neither_numpy_nor_a_client_library(statement):
    heavy = {"numpy", "redis", "valkey", "rich", "ml_dtypes", "msgpack", "asyncio", "redisacc._handles.base"}
    program = f"{statement}; import sys; sys.stderr.write(repr(sorted({heavy!r} & set(sys.modules))))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "[]"


def test_a_name_that_does_not_exist():
    assert not hasattr(redisacc, "NoSuchName")
    with pytest.raises(AttributeError, match="module 'redisacc' has no attribute 'TreeAcumulator'"):
        redisacc.TreeAcumulator  # noqa: B018
    assert "TreeAccumulator" in dir(redisacc)


def _ours(value, module):
    home = value.__module__
    return home.startswith("redisacc") if module in (redisacc, optim) else home == module.__name__


def test_every_error_stands_in_the_tree_with_its_bases():
    tree = errors.__doc__ or ""
    for name in errors.__all__:
        error = getattr(errors, name)
        assert issubclass(error, errors.RedisAccError)
        line = next(line for line in tree.splitlines() if f"{name}" in line.split("(")[0].split())
        for base in error.__bases__:
            if base.__module__ == "builtins" and base is not Exception:
                assert f"({base.__name__})" in line


@every_row("name", redisacc.__all__)
def test_everything_public_is_described(name):
    thing = getattr(redisacc, name)
    assert inspect.getdoc(thing)
    if inspect.isclass(thing):
        for attribute, value in vars(thing).items():
            if not attribute.startswith("_") and (callable(value) or isinstance(value, property)):
                assert inspect.getdoc(value), f"{name}.{attribute}"


@every_row(
    "cls, returned",
    [
        (redisacc.ConditionalAccumulator, "Array"),
        (redisacc.SparseConditionalAccumulator, "tuple[Array, Array, Array]"),
        (redisacc.TreeAccumulator, "Any"),
    ],
)
def test_help_names_the_class_of_an_inherited_method_and_what_it_returns_there(cls, returned):
    method = cls.take_grad
    assert inspect.signature(method).return_annotation == returned
    assert method.__qualname__ == f"{cls.__name__}.take_grad"
    assert (inspect.getdoc(method) or "").startswith("Takes the reduced gradient")
