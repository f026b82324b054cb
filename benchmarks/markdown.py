"""Writes a page of results, and makes its pieces as Markdown: figures, tables, pictures, and the beginning."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Results = dict[str, Any]


def write(
    results: Results,
    out: Path,
    names: tuple[str, str],
    render: Callable[[Results, dict[str, str]], str],
    draw: Callable[[Results, Path], dict[str, str]] | None,
) -> list[Path]:
    """Writes results, plots and a page into a folder.

    Args:
        results: the results.
        out: the folder, which is made if it does not exist.
        names: file names of the results and of the page.
        render: makes the page from the results and the plots, which it gets as title → file name.
        draw: draws the plots; None: there are none.

    Returns:
        The paths of the results and of the page.
    """
    out.mkdir(parents=True, exist_ok=True)
    data, text = (out / name for name in names)
    data.write_text(json.dumps(results, indent=1) + "\n")
    drawn = {}
    if draw is not None:
        try:
            drawn = draw(results, out)
        except ImportError:
            print("plots are skipped, because matplotlib is not installed: pip install 'redisacc[bench]'")
    text.write_text(render(results, drawn))
    return [data, text]


def head(results: Results, title: str, command: str, data: str, conclusion: str = "") -> str:
    """Returns the beginning of a page: its title, its conclusion, and what the figures come from.

    Args:
        results: all results of the run.
        title: the page's title.
        command: the command that writes the page.
        data: name of the file that holds every figure.
        conclusion: what a reader should know who reads nothing else.
    """
    machine = results["machine"]
    memory = f", {machine['memory_bytes'] / 2**30:.0f} GiB" if machine["memory_bytes"] else ""
    packages = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    servers = sorted({one["version"] for one in results.get("scripts", [])})
    notes = []
    if results["quick"]:
        notes.append("**A quick run with few rounds: do not rely on its figures.**")
    if results.get("in_place_limit") is not None:
        notes.append(f"**An experiment: every accumulator had in_place_limit={results['in_place_limit']}.**")
    return "\n".join(
        [
            f"# {title}",
            "",
            *([conclusion, "## The run", ""] if conclusion else []),
            f"Written by `{command}` on {results['when'][:10]} in {results['seconds']:.0f} s; "
            f"[{data}]({data}) holds every figure. Do not edit this page; run the benchmark again.",
            "",
            *notes,
            "All absolute times are valid for this machine only: "
            f"{machine['cpu']}, {machine['cores']} cores{memory}, {machine['system']}, load "
            f"{machine['load_before']:.1f} before the run. All peers were measured in alternation within one run, "
            "so compare the ratios. Of every ratio, more is better. Figures are medians, with quartiles "
            "in parentheses; those of a ratio are of the ratios of neighboring rounds. Every round's result was "
            "compared with numpy's.",
            "",
            packages + (f". Servers: {', '.join(servers)}." if servers else "."),
            "",
        ]
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, text: int = 1) -> str:
    """Returns a table. Its first columns, ``text`` of them, are text, and the others are figures."""
    rulers = ["---"] * text + ["---:"] * (len(columns) - text)
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join(rulers)} |"]
    lines += [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def picture(drawn: dict[str, str], title: str) -> str:
    """Returns a plot, or nothing if it was not drawn."""
    return f"![{title}]({drawn[title]})\n" if title in drawn else ""


def ms(seconds: Results) -> str:
    """Returns median and quartiles in milliseconds."""
    check_quartiles(seconds["median"], seconds)
    return f"{short(seconds['median'] * 1e3)} ({short(seconds['q1'] * 1e3)} to {short(seconds['q3'] * 1e3)})"


def short(value: float) -> str:
    """Returns a number with three digits and no exponent."""
    if value != value:  # noqa: PLR0124 - nan: unknown on this system
        return "?"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def check_quartiles(median: float, spread: Results) -> None:
    """Raises ValueError if a median lies outside its own quartiles: then they are not figures of the same values."""
    if not spread["q1"] <= median <= spread["q3"]:
        raise ValueError(f"the median {median} lies outside its quartiles, {spread['q1']} to {spread['q3']}")


def figure(ratio: Results) -> float:
    """Returns the one number that represents a ratio: the median of the ratios of neighboring rounds."""
    value: float = ratio.get("median", ratio["of_medians"])
    return value


def times(ratio: Results) -> str:
    """Returns a ratio with its quartiles.

    Results that were stored before ratios had a median of their own have the ratio of the medians instead. Its
    quartiles are not known; the quartiles of the ratios of rounds are shown where they are about the same figure.
    """
    value = figure(ratio)
    if "median" in ratio:
        check_quartiles(value, ratio)
    elif not ratio["q1"] <= value <= ratio["q3"]:
        return f"{short(value)}x"
    return f"{short(value)}x ({short(ratio['q1'])} to {short(ratio['q3'])})"


def between(values: Sequence[float]) -> str:
    """Returns the least and the largest of some ratios."""
    least, largest = short(min(values)), short(max(values))
    return f"{least}x" if least == largest else f"{least}x to {largest}x"


def versions(section: Results) -> str:
    """Returns a list of the peers' versions."""
    lines = [
        f"- {name}: " + ", ".join(f"{what} {version}" for what, version in found.items())
        for name, found in section["versions"].items()
    ]
    return "\n".join([*lines, ""])
