"""Draws the plots of the report, as SVG files whose text stays text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import figure
from benchmarks.workloads import EMBEDDED_BARS

Results = dict[str, Any]

# Readers with a dark theme get light text and lines on a dark background. Matplotlib writes colors into each element,
# where only an important rule overrides them.
_DARK = """
@media (prefers-color-scheme: dark) {
  [style*="fill: #ffffff"] { fill: #131416 !important }
  [style*="stroke: #000000"], [style*="stroke: #666666"] { stroke: #c9ccd1 !important }
  text, [id^="DejaVu"] { fill: #c9ccd1 !important }
}
"""


def paint_file(out: Path, name: str, paint: Callable[[Any, Any], None], panels: int, size: tuple[float, float]) -> str:
    """Draws one file of a number of panels side by side, and returns its name.

    Args:
        out: folder of the file.
        name: name of the file without its ending.
        paint: gets the figure and its panels.
        panels: number of panels.
        size: width and height in inches.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    # Keeps the files small, and makes the same results give the same bytes.
    mpl.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "redisacc",
            "font.family": "sans-serif",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "figure.facecolor": "white",
            "savefig.facecolor": "white",
        }
    )
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=size, layout="constrained", squeeze=False)
    paint(figure, axes[0])
    path = out / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    path.write_text(path.read_text().replace("</style>", f"{_DARK}</style>", 1))
    return f"{name}.svg"


def draw(results: Results, out: Path) -> dict[str, str]:
    """Draws a plot for every section that has results, and returns title → file name."""
    found: dict[str, str] = {}

    def save(name: str, title: str, paint: Callable[[Any, Any], None], panels: int, size: tuple[float, float]) -> None:
        found[title] = paint_file(out, name, paint, panels, size)

    rows = results.get("six-rows", {}).get("rows", {})
    if any("tensorflow" in row["peers"] for row in rows.values()):
        save("conclusion", "Conclusion", lambda _, axes: _conclusion(axes[0], rows), 1, (9, 3.4))
    for section, title in (("six-rows", "Six rows"), ("others", "Alternatives")):
        if section in results:
            rows = results[section]["rows"]
            save(section, title, lambda _, axes, rows=rows: bars(axes[0], rows, NAMES), 1, (9, 4.2))
    if "limits" in results:
        servers = results["limits"]["servers"]
        save("limits", "Limits", lambda _, axes: _limits(axes, servers), len(servers), (9, 4.2))
    if "bound" in results:
        bound = results["bound"]
        save("bound", "In place or buffered", lambda _, axes: _bound(axes, bound), len(bound["curves"]), (10, 3.6))
    for name, curve in results.get("growth", {}).get("curves", {}).items():
        file = "growth-" + name.replace(",", "").replace(" ", "-").lower()
        save(file, name, lambda _, axes, curve=curve, name=name: _growth(axes, name, curve), 3, (10, 3.2))
    if "reduction" in results:
        cases = results["reduction"]["cases"]
        save("reduction", "Reduction", lambda _, axes: _reduction(axes, cases), 2, (10, 3.6))
    return found


NAMES = {
    "tensorflow": "TensorFlow, gRPC",
    "redisacc": "redisacc, as embedded",
    "redisacc-memory": "redisacc, nothing on disk",
    "redisacc-durable": "redisacc, durable",
    "redisacc-memory-bfloat16": "redisacc, bfloat16, nothing on disk",
    "redisacc-bfloat16": "redisacc, bfloat16, as embedded",
    "bare": "bare sockets",
    "tensorflow-local": "TensorFlow, one process",
    "gloo": "torch all_reduce, gloo",
    "watch": "WATCH, get, add, set",
    "hincrbyfloat": "HINCRBYFLOAT, pipeline",
}


def _conclusion(axis: Any, rows: Results) -> None:
    """Draws for each row how many times as long TensorFlow takes, with both servers, and the bars as lines."""
    for place, key, bars in (
        (-0.2, "redisacc", EMBEDDED_BARS),
        (0.2, "redisacc-memory", {name: row["bar"] for name, row in rows.items() if "bar" in row}),
    ):
        known = [(k, name, row) for k, (name, row) in enumerate(rows.items()) if key in row["ratios"]]
        values = [figure(row["ratios"][key]) for _, _, row in known]
        axis.bar([k + place for k, _, _ in known], values, 0.38, label=NAMES[key])
        for k, name, _ in known:
            if name in bars:
                axis.plot([k + place - 0.19, k + place + 0.19], [bars[name]] * 2, color="black", lw=1.5)
    label_ratios(axis, rows)


def label_ratios(axis: Any, rows: Results) -> None:
    """Labels the bars of ratios to TensorFlow, one group for each row."""
    axis.axhline(1, color="0.4", lw=0.8)
    axis.set_xticks(range(len(rows)), [name.replace("-of-", "\nof ").replace("-", " ") for name in rows])
    axis.set_ylabel("TensorFlow's time / redisacc's\n(line: bar)")
    axis.grid(axis="x", visible=False)
    axis.legend(fontsize=8)


def bars(axis: Any, rows: Results, names: dict[str, str]) -> None:
    """Draws a group of bars for each row, with a bar for each peer."""
    peers = list(dict.fromkeys(peer for row in rows.values() for peer in row["peers"]))
    width = 0.8 / len(peers)
    for place, peer in enumerate(peers):
        xs = [k + (place - (len(peers) - 1) / 2) * width for k, row in enumerate(rows.values()) if peer in row["peers"]]
        found = [row["peers"][peer]["seconds"] for row in rows.values() if peer in row["peers"]]
        _whiskered(axis, xs, found, width, names[peer])
    axis.set_xticks(range(len(rows)), [name.replace("-of-", "\nof ").replace("-", " ") for name in rows])
    axis.set_yscale("log")
    plain(axis.yaxis)
    axis.set_ylabel("ms a round (median, quartiles)")
    axis.grid(axis="x", visible=False)
    axis.legend(fontsize=8)


def _whiskered(axis: Any, xs: Sequence[float], found: list[Results], width: float, label: str) -> None:
    medians = [1e3 * one["median"] for one in found]
    spread = [
        [1e3 * (one["median"] - one["q1"]) for one in found],
        [1e3 * (one["q3"] - one["median"]) for one in found],
    ]
    axis.bar(xs, medians, width * 0.92, label=label, yerr=spread, error_kw={"lw": 0.8, "capsize": 2})


def _limits(axes: Any, servers: Results) -> None:
    for axis, (label, sizes) in zip(axes, servers.items(), strict=True):
        large = [(size, result) for size, result in sizes.items() if "bytes" in result]
        names = [name for name in large[0][1]["seconds"] if not name.startswith("numpy")]
        height = 0.8 / len(large)
        for place, (size, result) in enumerate(large):
            rates = [result["bytes"] / result["seconds"][name]["median"] / 1e9 for name in names]
            axis.barh([k + place * height for k in range(len(names))], rates, height * 0.92, label=size)
        axis.set_yticks([k + 0.4 - height / 2 for k in range(len(names))], names)
        axis.invert_yaxis()
        axis.set_xlabel(f"GB/s, server {label}")
        axis.grid(axis="y", visible=False)
        axis.legend(fontsize=8)


def _bound(axes: Any, bound: Results) -> None:
    for axis, (name, curve) in zip(axes, bound["curves"].items(), strict=True):
        xs = [point["elements"] for point in curve]
        for color, way in zip(("C0", "C1"), ("in place", "buffered"), strict=True):
            axis.plot(xs, [1e6 * point[way]["seconds"]["median"] for point in curve], "o-", color=color, label=way)
            axis.plot(xs, [point[way]["script_us"] for point in curve], "o--", color=color, label=f"{way}: script")
        axis.axhline(bound["allowed_us"], color="0.4", lw=0.8)
        axis.set(xscale="log", yscale="log", xlabel="elements", ylabel="µs an apply", title=name)
        plain(axis.xaxis, axis.yaxis)
        axis.legend(fontsize=7)


def _growth(axes: Any, name: str, curve: list[Results]) -> None:
    xs = [point["x"] for point in curve]
    label = name.replace(" of ", ",").partition(",")[0]
    axes[0].plot(xs, [1e3 * point["seconds"]["median"] for point in curve], "o-", label="a round")
    axes[0].plot(xs, [1e3 * point["server_cpu_seconds"] for point in curve], "o-", label="server CPU")
    axes[1].plot(xs, [point["server_memory"] / 1e6 for point in curve], "o-", label="server memory")
    axes[2].plot(xs, [point["bytes_in"] / 1e6 for point in curve], "o-", label="to the server")
    axes[2].plot(xs, [point["bytes_out"] / 1e6 for point in curve], "o-", label="from the server")
    axes[2].plot(
        xs,
        [point["gradients"] * point["bytes_of_a_gradient"] / 1e6 for point in curve],
        "--",
        color="0.5",
        lw=0.9,
        label="the gradients themselves",
    )
    for axis, unit in zip(axes, ("ms", "MB", "MB"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel=label, ylabel=unit)
        plain(axis.xaxis, axis.yaxis)
        axis.legend(fontsize=7)


def plain(*axes: Any) -> None:
    """Writes the ticks of a logarithmic axis as plain numbers, and adds ticks if the axis spans little."""
    from matplotlib.ticker import LogLocator

    for axis in axes:
        low, high = axis.get_view_interval()
        if high < 200 * low:
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")


def _reduction(axes: Any, cases: Results) -> None:
    places = range(len(cases))
    labels = [f"{name} ({case['gradients']})" for name, case in cases.items()]
    axes[0].barh(
        [k - 0.2 for k in places], [1e3 * case["take_seconds"]["median"] for case in cases.values()], 0.38, label="take"
    )
    axes[0].barh(
        [k + 0.2 for k in places],
        [1e3 * case["numpy_seconds"]["median"] for case in cases.values()],
        0.38,
        label="numpy, arrays in memory",
    )
    axes[0].set(xscale="log", xlabel="ms")
    gradients = [case["gradients"] * case["bytes_of_a_gradient"] / 1e6 for case in cases.values()]
    for shift, values, label in (
        (-0.27, gradients, "all gradients"),
        (0, [(case["peak_memory"] or 0) / 1e6 for case in cases.values()], "taker's peak"),
        (0.27, [case["bytes_of_the_result"] / 1e6 for case in cases.values()], "result"),
    ):
        axes[1].barh([k + shift for k in places], values, 0.25, label=label)
    axes[1].set(xscale="log", xlabel="MB")
    axes[0].set_yticks(places, labels)
    axes[1].set_yticks(places, [""] * len(cases))
    for axis in axes:
        plain(axis.xaxis)
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.16), ncols=3, frameon=False)
