"""Draws a step as an SVG, and lists what takes long in it."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

COLORS = {
    "exchange": "#4c78a8",
    "fetch": "#72b7b2",
    "wait": "#d8d8d8",
    "pause": "#d8d8d8",
    "listen": "#ececec",
    "call": "#f58518",
    "command": "#e45756",
}
WAITING = ("wait", "pause", "listen")
# What takes at least this long, in nanoseconds, and this share of the step, is listed.
LONG, SHARE = 200_000, 0.02
WIDTH, LANE, LEFT = 1500, 34, 190


class Block(NamedTuple):
    """A block of a lane, in nanoseconds. ``cpu`` is what its thread computed in it; negative if that is unknown."""

    kind: str
    text: str
    began: int
    ended: int
    cpu: int


@dataclass
class Step:
    """A step: when it began and ended, and the blocks of each lane."""

    began: int
    ended: int
    median_length: float
    lanes: dict[str, list[Block]] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """How long it took, in nanoseconds."""
        return self.ended - self.began

    @classmethod
    def median(cls, processes: list[dict[str, Any]]) -> Step:
        """Returns the step of median length of the second half of what was recorded."""
        first = processes[0]
        if first["role"] == "taker":
            bounds = [(span[3], span[4]) for span in first["spans"] if span[1:3] == ["call", "take"]]
        else:
            bounds = list(zip(first["begins"], first["begins"][1:], strict=False))
        bounds = bounds[len(bounds) // 2 :]
        length = statistics.median_low(ended - began for began, ended in bounds)
        step = cls(*next(bound for bound in bounds if bound[1] - bound[0] == length), length)
        for number, process in enumerate(processes):
            lanes = defaultdict(list)
            threads = defaultdict(list)
            for span in process["spans"]:
                threads[span[9]].append(span)
            for spans in threads.values():
                lanes[spans[0][0].partition(" ")[0]] += _blocks(spans)
            named = "taker" if process["role"] == "taker" else f"process {number}"
            for name, blocks in lanes.items():
                step._add(f"{named}, {name}", blocks)
        for number, (_, commands) in enumerate(first["servers"].items()):
            step._add(f"server {number}" if len(first["servers"]) > 1 else "server", _placed(commands, processes))
        return step

    def _add(self, lane: str, blocks: list[Block]) -> None:
        inside = [block for block in blocks if block.ended > self.began and block.began < self.ended]
        # A thread that only listened is left out.
        if any(block.kind not in WAITING for block in inside):
            self.lanes[lane] = sorted(inside, key=lambda block: block.began)

    def gaps(self) -> Iterator[tuple[str, Block]]:
        """Yields what takes long: blocks, and what a thread does between two of them."""
        least = max(LONG, SHARE * self.length)
        for lane, blocks in self.lanes.items():
            for block in blocks:
                long = block.ended - block.began >= least and block.began >= self.began
                if long and block.kind not in ("call", *WAITING):
                    yield lane, block


def _blocks(spans: list[list[Any]]) -> Iterator[Block]:
    """Yields the blocks of a thread, and between them what it does itself."""
    before = None
    for _, kind, text, began, ended, cpu, after, *_ in sorted(spans, key=lambda span: span[3]):
        if kind == "call":
            yield Block(kind, text, began, ended, after - cpu)
            continue
        if before is not None and began > before[1]:
            yield Block("python", f"after {before[0]}", before[1], began, cpu - before[2])
        yield Block(kind, text, began, ended, after - cpu)
        before = text or kind, ended, after


def _placed(commands: list[list[Any]], processes: list[dict[str, Any]]) -> list[Block]:
    """Returns the commands of a server, each as late as its reply and the next command allow."""
    ends: dict[int, float] = {}
    by_client = defaultdict(list)
    for place, (client, _, _) in enumerate(commands):
        by_client[client].append(place)
    # From the end: what a client sent before the server began to note it is in no list.
    for process in processes:
        for span in reversed(process["spans"]):
            places, names = by_client.get(span[7], []), span[8]
            if names == ["fetch"]:
                while places and commands[places[-1]][1] == "GET":
                    ends[places.pop()] = span[4]
                continue
            while names and len(places) >= len(names):
                if [commands[place][1] for place in places[-len(names) :]] == names:
                    ends |= dict.fromkeys(places[-len(names) :], span[4])
                    del places[-len(names) :]
                    break
                places.pop()
    known = {span[7] for process in processes for span in process["spans"]}
    blocks, last = [], float("inf")
    for place in reversed(range(len(commands))):
        client, name, took = commands[place]
        # A command of a script has no client, and is in the time of the script.
        if client.startswith("?") or (place not in ends and client in known):
            continue
        last = min(ends.get(place, last), last)
        if last < float("inf"):
            last -= took * 1000
            blocks.append(Block("command", name, int(last), int(last) + took * 1000, took * 1000))
    return blocks


def _ms(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.2f}"


def table(step: Step) -> list[str]:
    """Returns a table of what takes long in a step, and another one of the server's commands."""
    lines = [
        f"{_ms(step.length)} ms. Blocks of work of at least {max(LONG, SHARE * step.length) / 1e6:.1f} ms:",
        "",
        "| lane | from, ms | ms | processor time, ms | work |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for lane, block in step.gaps():
        what = f"{block.kind}: {block.text}" if block.text else block.kind
        times = (block.began - step.began, block.ended - block.began, block.cpu)
        lines.append(f"| {lane} | {' | '.join(map(_ms, times))} | {what} |")
    totals: dict[str, list[int]] = defaultdict(list)
    for lane, blocks in step.lanes.items():
        if lane.startswith("server"):
            for block in blocks:
                totals[block.text.lower() if block.text.isupper() else block.text].append(block.cpu)
    listed = sorted(totals.items(), key=lambda item: -sum(item[1]))
    return [
        *lines,
        "",
        "The server's commands: "
        + ", ".join(f"{len(of)} {name} ({sum(of) / 1000:.0f} µs)" for name, of in listed)
        + ".",
    ]


def draw(step: Step, title: str) -> str:
    """Returns a step as an SVG."""
    scale = (WIDTH - LEFT - 20) / step.length
    height = 60 + LANE * len(step.lanes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="10" y="18" font-size="14">{escape(title)}: {step.length / 1e6:.2f} ms</text>',
    ]
    for tick in range(int(step.length / 1e6) + 1):
        x = LEFT + tick * 1e6 * scale
        parts.append(f'<line x1="{x:.1f}" y1="26" x2="{x:.1f}" y2="{height - 14}" stroke="#e0e0e0"/>')
        if step.length < 40e6 or tick % 5 == 0:
            parts.append(f'<text x="{x:.1f}" y="{height - 3}">{tick} ms</text>')
    for place, (lane, blocks) in enumerate(step.lanes.items()):
        y = 30 + place * LANE
        parts.append(f'<text x="6" y="{y + 18}">{escape(lane)}</text>')
        for block in blocks:
            began, ended = max(block.began, step.began), min(block.ended, step.ended)
            x, width = LEFT + (began - step.began) * scale, max((ended - began) * scale, 0.4)
            is_call, color = block.kind == "call", COLORS.get(block.kind, "#bfe3b4")
            said = f"{block.text or block.kind}: {_ms(block.ended - block.began)} ms, computing {_ms(block.cpu)}"
            parts.append(
                f'<rect x="{x:.1f}" y="{y if is_call else y + 4}" width="{width:.1f}" height="{4 if is_call else 22}" '
                f'fill="{color}"><title>{escape(said)}</title></rect>'
            )
            if not is_call and block.kind not in (*WAITING, "python") and width > 30:
                text = escape(block.text[: int(width / 6)])
                parts.append(f'<text x="{x + 2:.1f}" y="{y + 18}" fill="#ffffff" font-size="10">{text}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
