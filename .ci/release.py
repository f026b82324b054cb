"""Builds the files of a release in dist/ and checks them, uploading nothing: `make release`.

1. The version in `redisacc/_version.py` has an entry in CHANGELOG.md, and CITATION.cff names it.
2. The wheel holds what it should and nothing else, and so does the source distribution. `twine check` accepts both, and
   the links of their description are absolute.
3. In fresh environments of every Python that redisacc supports, `smoke.py` uses what is installed: the wheel alone
   and with its extras, the source distribution, the newest numpy and numpy 1.26, and the lowest versions that
   pyproject.toml allows. A Python that this machine lacks is skipped, and named at the end.

The extra `torch` is left out, because PyTorch takes gigabytes; `make examples` tests it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from redisacc._version import __version__ as VERSION
from redisacc.embedded.program import find_server

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
SMOKE = Path(__file__).with_name("smoke.py")

PYTHONS = ("3.11", "3.12", "3.13")
EXTRAS = ("server", "asyncio", "serve", "otel")

# What the wheel adds to the files of the package.
DIST_INFO = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
# Tracked files that the source distribution leaves out: how the repository is hosted and checked, not what it holds.
NOT_IN_SDIST = re.compile(r"\.ci/|\.github/|\.dockerignore|\.luacheckrc|\.pre-commit-config\.yaml")


class Failure(Exception):
    """The release must not be published as it is."""


@dataclass(frozen=True)
class Case:
    """One fresh environment.

    Attributes:
        name: what is installed, for the output.
        file: what is installed: "whl" or "tar.gz".
        extras: extras that are installed with it.
        pins: further requirements.
        lowest: install the lowest versions that pyproject.toml allows.
        without: versions of Python for which the pins have no wheels.
    """

    name: str
    file: str = "whl"
    extras: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
    lowest: bool = False
    without: tuple[str, ...] = ()


CASES = (
    Case("wheel, newest dependencies"),
    Case("wheel with extras, newest dependencies", extras=EXTRAS),
    Case("wheel with extras, numpy 1.26", extras=EXTRAS, pins=("numpy==1.26.*",), without=("3.13",)),
    Case("wheel, lowest dependencies", lowest=True),
    Case("wheel with extras, lowest dependencies", extras=EXTRAS, lowest=True),
    Case("source distribution, newest dependencies", file="tar.gz"),
)


def run(*command: str | Path, cwd: Path = ROOT, environment: dict[str, str] | None = None) -> str:
    """Runs a command; returns its output, or raises Failure with it."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Failure(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def tracked() -> set[str]:
    """Returns the files of the checkout, which have to be committed: a release is made of a commit."""
    if changed := run("git", "status", "--porcelain"):
        raise Failure(f"a release is made of a commit, but these files differ from it:\n{changed}")
    return set(run("git", "ls-files").splitlines())


def check_statements() -> None:
    """Checks that every file that states the version states this one."""
    if f"\n## {VERSION}" not in (ROOT / "CHANGELOG.md").read_text():
        raise Failure(f"CHANGELOG.md has no entry for {VERSION}")
    if f"\nversion: {VERSION}\n" not in (ROOT / "CITATION.cff").read_text():
        raise Failure(f"CITATION.cff does not name version {VERSION}")


def build() -> None:
    """Builds the source distribution, and from it the wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST)
    run(sys.executable, "-m", "twine", "check", "--strict", *DIST.iterdir())


def compare(found: set[str], expected: set[str], what: str) -> None:
    """Raises Failure if an archive holds other files than expected."""
    differences = [f"- {name} is missing" for name in sorted(expected - found)]
    differences += [f"- {name} should not be there" for name in sorted(found - expected)]
    if differences:
        raise Failure("\n".join([f"{what}:", *differences]))


def check_contents(files: set[str]) -> None:
    """Checks the names in both archives."""
    package = {name for name in files if name.startswith("redisacc/")} | {"_redisacc_command.py"}
    scripts = {f"redisacc/{name}" for name in files if name.startswith("lua/")}
    if not scripts or "redisacc/py.typed" not in package:
        raise Failure("the checkout lacks Lua scripts or redisacc/py.typed")
    info = {f"redisacc-{VERSION}.dist-info/{name}" for name in DIST_INFO}
    with zipfile.ZipFile(archive("whl")) as wheel:
        compare(set(wheel.namelist()), package | scripts | info, "the wheel")
    with tarfile.open(archive("tar.gz")) as sdist:
        names = {Path(*Path(member.name).parts[1:]).as_posix() for member in sdist if member.isfile()}
    compare(names, {name for name in files if not NOT_IN_SDIST.match(name)} | {"PKG-INFO"}, "the source distribution")


def check_description() -> None:
    """Checks that the description has the README's links, and none that needs the repository next to it."""
    with zipfile.ZipFile(archive("whl")) as wheel:
        metadata = wheel.read(f"redisacc-{VERSION}.dist-info/METADATA").decode()
    targets = re.findall(r"\]\(([^)\s]+)\)", metadata)
    relative = [target for target in targets if not target.startswith("https://")]
    if relative or not targets:
        raise Failure(f"the wheel's description has links that are relative, or none: {relative}")


def archive(ending: str) -> Path:
    """Returns the file in dist/ with this ending."""
    [file] = DIST.glob(f"*.{ending}")
    return file


def interpreter(version: str) -> str | None:
    """Returns the path of a Python of this version on this machine, or None."""
    places = [str(path.parent) for path in Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python")]
    path = os.pathsep.join([*places, os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "uv", "python", "find", "--no-python-downloads", "--no-project", version],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() if done.returncode == 0 else None


def try_in(python: str, case: Case, folder: Path) -> str:
    """Installs into a fresh environment and uses it there; returns the version of numpy.

    Only the lowest versions need uv: pip does what users do.
    """
    own = folder / "bin" / "python"
    uv = (sys.executable, "-m", "uv")
    run(*uv, "venv", "--quiet", "--seed", "--python", python, folder)
    file = archive(case.file)
    if case.lowest:
        extras = [word for extra in case.extras for word in ("--extra", extra)]
        lowest = ("--resolution", "lowest-direct", "-r", ROOT / "pyproject.toml", *extras)
        run(*uv, "pip", "install", "--quiet", "--python", own, *lowest)
        run(own, "-m", "pip", "install", "--quiet", "--no-deps", file)
    else:
        extras_of_pip = f"[{','.join(case.extras)}]" if case.extras else ""
        run(own, "-m", "pip", "install", "--quiet", f"{file}{extras_of_pip}", *case.pins)
    run(own, "-m", "pip", "check")
    server = {} if "server" in case.extras else {"REDISACC_SERVER": str(find_server())}
    # -P: the folder of smoke.py is not searched for modules.
    run(own, "-P", SMOKE, VERSION, *case.extras, cwd=folder, environment=server)
    return run(own, "-c", "import numpy; print(numpy.__version__)", cwd=folder).strip()


def main() -> None:
    """Builds and checks; ends with a message about the first failure."""
    files = tracked()
    check_statements()
    build()
    check_contents(files)
    check_description()
    print(f"dist/ holds redisacc {VERSION}: twine accepts it, and both archives hold what they should", flush=True)
    missing = []
    for version in PYTHONS:
        python = interpreter(version)
        if python is None:
            missing.append(version)
            continue
        for case in CASES:
            if version in case.without:
                continue
            with tempfile.TemporaryDirectory() as folder:
                numpy = try_in(python, case, Path(folder) / "environment")
            print(f"Python {version}, {case.name} (numpy {numpy}): works", flush=True)
    if missing:
        print(f"skipped, because this machine lacks it: Python {', '.join(missing)}")


if __name__ == "__main__":
    try:
        main()
    except Failure as failure:
        sys.exit(f"make release: {failure}")
