"""Runs the code blocks of a page of the documentation, in the order in which a reader meets them.

A page gets an empty directory and a server of its own, whose URL is in ``REDISACC_URL``.

========================================  ==========================================================================
block                                     what is done with it
========================================  ==========================================================================
its first line is a comment, ``# NAME.X``   written to that file; a later block has to use it
``python``                                executed; the blocks of a page share their names
``console``                               what follows ``$ `` (and ``> ``, for further lines) goes to bash
``text``, or no language                  nothing: a picture made of characters
``{…}``                                   nothing: a directive of Sphinx's
========================================  ==========================================================================

Output that a page shows is compared: of Python, the text after ``print(…)  # ``; of the shell, the lines without
``$ ``. There ``…`` matches anything, and alone on its line for any number of lines.

``<!-- not run: REASON -->`` above a block excuses it: it becomes a skipped test with that reason. Pages that another
test runs are listed in ``RUN_BY``.
"""

import contextlib
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"

# Page → the test that runs it, where that isn't this one.
RUN_BY = {
    "guides/arrays.md": "tests/docs/test_arrays.py",
    "guides/evaluation.md": "tests/docs/test_torch_pages.py",
    "guides/jax.md": "tests/examples/test_jax_guide.py",
    "guides/kubernetes.md": "tests/docs/test_kubernetes.py",
    "guides/learning-rate.md": "tests/docs/test_torch_pages.py",
    "guides/pytorch-details.md": "tests/docs/test_torch_pages.py",
    "guides/pytorch.md": "tests/docs/test_torch_pages.py",
    "guides/resume.md": "tests/docs/test_torch_pages.py",
    "guides/several-hosts.md": "tests/docs/test_several_hosts_page.py",
    "reference/redis-cli.md": "tests/redis_cli/test_inspect_scripts.py",
}

_FENCE = re.compile(
    r"(?:^<!-- not run: (?P<excuse>.*?) -->\n)?^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_FILE = re.compile(r"^# ([\w-]+\.\w+)$", re.MULTILINE)
_IMPORT = re.compile(r"^from (\w+) import", re.MULTILINE)
_PRINT = re.compile(r"^ *print\(.*\)  # (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line of the page on which it begins, and why it isn't run."""

    language: str
    text: str
    line: int
    excuse: str | None

    @property
    def file(self):
        """The file that it is to be written to."""
        match = _FILE.match(self.text)
        return match[1] if match else None


def blocks_of(page):
    """The blocks of a page."""
    text = page.read_text()
    return [
        Block(found["language"], found["text"], text.count("\n", 0, found.start("text")), found["excuse"])
        for found in _FENCE.finditer(text)
        if not found["language"].startswith("{")
    ]


def run_by(page):
    """The test that runs a page, if it isn't this one."""
    return RUN_BY.get(str(page.relative_to(DOCS)))


class Reader:
    """A reader who types in the code of a page.

    Args:
        page: for messages.
        directory: an empty one, in which everything is run.
        url: of the server.
    """

    def __init__(self, page, directory, url):
        self._page = page
        self._directory = directory
        self._names = {"__name__": "__page__"}
        self._unused = set()
        self._shells = []
        commands = directory / ".bin"
        commands.mkdir()
        self._environment = {**os.environ, "REDISACC_URL": url, "PATH": f"{commands}:{os.environ['PATH']}"}
        redis_cli = shutil.which("redis-cli") or "redis-cli"
        for name, command in {
            "python": [sys.executable],
            "redisacc": [sys.executable, "-m", "redisacc"],
            "redis-cli": [redis_cli, "-u", url],
        }.items():
            (commands / name).write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
            (commands / name).chmod(0o755)

    def read(self, blocks):
        """Runs the blocks one after the other."""
        try:
            for block in blocks:
                where = f"{self._page.name}, line {block.line}"
                if block.excuse is not None:
                    self._unused = {name for name in self._unused if name not in block.text}
                    continue
                if block.file is not None:
                    (self._directory / block.file).write_text(block.text)
                    self._unused.add(block.file)
                    self._unused -= {f"{module}.py" for module in _IMPORT.findall(block.text)}
                elif block.language == "python":
                    self._python(block, where)
                elif block.language == "console":
                    self._console(block, where)
                else:
                    assert block.language in ("", "text"), f"{where}: there is no way to run {block.language!r}"
            assert not self._unused, f"{self._page.name}: files that no later block uses: {self._unused}"
        finally:
            self._stop()

    def _python(self, block, where):
        out = io.StringIO()
        code = compile("\n" * block.line + block.text, str(self._page), "exec")
        with contextlib.redirect_stdout(out):
            exec(code, self._names)
        printed = out.getvalue().splitlines()
        rest = iter(printed)
        for expected in _PRINT.findall(block.text):
            assert any(_same(expected, line) for line in rest), f"{where}: no {expected!r} in {printed}"

    def _console(self, block, where):
        lines = block.text.splitlines()
        commands = [line[2:] for line in lines if line.startswith(("$ ", "> "))]
        expected = [line for line in lines if not line.startswith(("$ ", "> "))]
        self._unused = {name for name in self._unused if name not in block.text}
        # A file and not a pipe, which a process in the background would hold open.
        log = self._directory / f".out-{block.line}"
        with log.open("wb") as out:
            shell = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", "\n".join(commands)],
                cwd=self._directory,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._shells.append(shell)
        try:
            status = shell.wait(timeout=90)
        except subprocess.TimeoutExpired:
            status = "nothing for 90 s"
        printed = log.read_text()
        assert status == 0, f"{where}: the shell ended with {status}:\n{printed}"
        if expected:
            pattern = "".join(r"(?:.*\n)*?" if line == "…" else f"{_pattern(line)}\n" for line in expected)
            assert re.fullmatch(pattern, printed), f"{where}: the page shows other output than\n{printed}"

    def _stop(self):
        self._names.clear()
        for shell in self._shells:
            # The shell's group, with all that it left running in the background.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()


def _pattern(expected):
    return ".*".join(re.escape(piece) for piece in expected.split("…"))


def _same(expected, printed):
    return re.fullmatch(_pattern(expected), printed) is not None
