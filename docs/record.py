"""Records what a program prints to a terminal, as an SVG file that plays in a browser: `make recording`.

    python docs/record.py OUT.svg -- PROGRAM [ARGUMENT]...

The program runs in a pseudo-terminal of 80 columns, and may print lines and colors but not move the cursor. The file
plays these lines at the times at which they came, again and again, where a pause is cut to a second. It loads nothing
and runs no script. Readers who ask for less motion see the end.
"""

from __future__ import annotations

import html
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path

from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.terminal_theme import DIMMED_MONOKAI as THEME
from rich.text import Text

COLUMNS, ROWS = 80, 24
# The longest pause between two lines, and that after the last one, in seconds.
LONGEST_PAUSE, END_PAUSE = 1.0, 6.0

# In pixels: the size of a character, the height of a line, and the margin.
FONT, CHARACTER, LINE, MARGIN = 14, 8.43, 19, 14


@dataclass(frozen=True)
class Line:
    """A line as it was printed.

    Attributes:
        at: when it was complete, in seconds since the start.
        text: its text, with its colors.
    """

    at: float
    text: Text


def record(program: Sequence[str]) -> list[Line]:
    """Runs a program in a terminal, and returns the lines that it prints.

    Raises:
        subprocess.CalledProcessError: the program fails.
    """
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "PYTHONUNBUFFERED": "1"}
    started = time.monotonic()
    with subprocess.Popen(program, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        lines = [Line(time.monotonic() - started, piece) for text in _lines(ours) for piece in _wrapped(text)]
    os.close(ours)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, program)
    return lines


def _lines(terminal: int) -> Iterator[str]:
    """Yields the lines that are written to a terminal, until its last writer closes it."""
    waiting = b""
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:
            # Linux reports the end of a terminal as an error.
            data = b""
        *complete, waiting = (waiting + data).split(b"\n")
        yield from [line.decode(errors="replace").rstrip("\r") for line in complete]
        if not data:
            break
    if waiting:
        yield waiting.decode(errors="replace")


def _wrapped(line: str) -> list[Text]:
    """Returns a line as a terminal shows it, where a long one goes on in the next."""
    text = Text.from_ansi(line)
    return list(text.divide(range(COLUMNS, len(text), COLUMNS)))


def shortened(lines: Sequence[Line]) -> list[Line]:
    """Returns the lines without what is too long of their pauses. The first comes at once."""
    found: list[Line] = []
    for before, line in zip([lines[0], *lines], lines, strict=False):
        at = found[-1].at + min(line.at - before.at, LONGEST_PAUSE) if found else 0.0
        found.append(Line(at, line.text))
    return found


def svg(lines: Sequence[Line], title: str) -> str:
    """Returns the recording as an SVG file.

    All lines stand below each other in one group, which moves up by a line for each one that comes when the screen is
    full. Before, a cover moves down.
    """
    title = html.escape(title)
    seconds = lines[-1].at + END_PAUSE
    width, height = COLUMNS * CHARACTER + 2 * MARGIN, ROWS * LINE + 2 * MARGIN + LINE
    background, foreground = THEME.background_color.hex, THEME.foreground_color.hex
    scrolls, covers = ["0%{transform:none}"], ["0%{transform:none}"]
    for number, line in enumerate(lines, start=1):
        share = f"{100 * line.at / seconds:.2f}%"
        if number <= ROWS:
            covers.append(f"{share}{{transform:translateY({number * LINE}px)}}")
        else:
            scrolls.append(f"{share}{{transform:translateY(-{(number - ROWS) * LINE}px)}}")
    rows = "\n".join(_row(number, line.text) for number, line in enumerate(lines))
    hidden = max(len(lines) - ROWS, 0) * LINE
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">
<title>{title}</title>
<style>
text {{ font: {FONT}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace }}
text {{ fill: {foreground}; white-space: pre }}
#lines {{ transform: translateY(-{hidden}px) }}
#cover {{ transform: translateY({ROWS * LINE}px) }}
@media (prefers-reduced-motion: no-preference) {{
#lines {{ animation: scroll {seconds:.2f}s step-end infinite }}
#cover {{ animation: uncover {seconds:.2f}s step-end infinite }}
}}
@keyframes scroll {{ {" ".join(scrolls)} }}
@keyframes uncover {{ {" ".join(covers)} }}
</style>
<clipPath id="screen"><rect width="{width:g}" height="{ROWS * LINE}"/></clipPath>
<rect width="{width:g}" height="{height:g}" rx="8" fill="{background}"/>
<text x="{MARGIN}" y="{MARGIN + FONT}" opacity="0.6">$ {title}</text>
<g transform="translate({MARGIN} {MARGIN + LINE})" clip-path="url(#screen)">
<g id="lines">
{rows}
</g>
<rect id="cover" width="{width:g}" height="{ROWS * LINE}" fill="{background}"/>
</g>
</svg>
"""


def _row(number: int, text: Text) -> str:
    """Returns a line as SVG, with a span for each piece of one style."""
    spans = "".join(_span(segment) for segment in text.render(Console(), end=""))
    return f'<text y="{number * LINE + FONT}">{spans}</text>'


def _span(segment: Segment) -> str:
    style = segment.style or Style()
    rules = []
    if style.color is not None and not style.color.is_default:
        rules.append(f"fill:{style.color.get_truecolor(THEME).hex}")
    if style.bold:
        rules.append("font-weight:bold")
    if style.dim:
        rules.append("opacity:0.6")
    text = html.escape(segment.text, quote=False)
    return f'<tspan style="{";".join(rules)}">{text}</tspan>' if rules else text


def main(arguments: Sequence[str]) -> int:
    """Records a program. Returns the exit code."""
    if len(arguments) < 3 or arguments[1] != "--":
        print(__doc__, file=sys.stderr)
        return 2
    out, _, *program = arguments
    lines = shortened(record(program))
    Path(out).write_text(svg(lines, " ".join([Path(program[0]).name, *program[1:]])))
    print(f"{out}: {len(lines)} lines, {lines[-1].at:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
