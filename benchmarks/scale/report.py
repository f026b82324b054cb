"""Writes the page about large crews, and draws its plot."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.markdown import picture, table
from benchmarks.plots import paint_file, plain
from benchmarks.scale.runs import COMPARED, GIGABITS, HOSTS, MODELS, TOGETHER

Results = dict[str, Any]
TITLE = "A step of 16 to 1,000 hosts"


def milliseconds(seconds: float) -> str:
    """Returns a time in ms with at most three digits that count."""
    value = seconds * 1e3
    return f"{value:.1f}" if value < 10 else f"{float(f'{value:.3g}'):,.0f}"


def what_is_full(run: Results) -> str:
    """Returns what is the busiest in a run, and the share of the time in which it is."""
    name, share = next(iter(run["busy"].items()))
    return f"{name} ({share:.0%})"


def draw(results: Results, out: Path) -> dict[str, str]:
    """Draws the plot."""

    def paint(_: Any, axes: Any) -> None:
        for axis, gigabits in zip(axes, GIGABITS, strict=True):
            for number, name in enumerate(MODELS):
                rows = [run for run in results["runs"]["grown"] if (run["model"], run["gigabits"]) == (name, gigabits)]
                hosts = [run["hosts"] for run in rows]
                axis.plot(hosts, [1e3 * run["seconds"] for run in rows], "o-", color=f"C{number}", label=name, ms=4)
                axis.plot(hosts, [1e3 * run["gloo"] for run in rows], ":", color=f"C{number}", lw=1)
            axis.set(title=f"{gigabits} Gbit/s", xlabel="hosts", xscale="log", yscale="log", ylim=(0.3, 60_000))
            axis.set_xticks(HOSTS)
            axis.minorticks_off()
            plain(axis.xaxis)
            plain(axis.yaxis)
        axes[0].set_ylabel("ms a step (dotted: wire of an all-reduce)")
        axes[0].legend(fontsize=8, loc="lower right")

    return {TITLE: paint_file(out, "scale", paint, panels=len(GIGABITS), size=(9, 3.6))}


def render(results: Results, drawn: dict[str, str]) -> str:
    """Returns the page."""
    steps = [step for step in results["steps"] if not step["fitted"]]
    ratios = sorted([step["simulated"] / step["seconds"] for step in steps])
    machine, name, (model, gigabits) = results["machine"], "scale.json", COMPARED
    grown = [
        (
            run["model"],
            run["gigabits"],
            run["hosts"],
            run["partitions"],
            milliseconds(run["seconds"]),
            milliseconds(run["gloo"]),
            what_is_full(run),
        )
        for run in results["runs"]["grown"]
    ]
    return "\n".join(
        [
            "# Performance of large crews",
            "",
            f"Simulated steps of `Chief(optimizer=…)` with 16 to 1,000 hosts, written by `make scale` on "
            f"{results['when'][:10]} ([{name}]({name}) holds every figure). The costs of commands, messages, scripts "
            f"and bytes were measured on this machine: {machine['cpu']}, {machine['cores']} cores, load "
            f"{machine['load_before']:.1f} before the run.",
            "",
            picture(drawn, TITLE),
            "Each worker's host has a node with its reducer, and a core for each process. Parameters are float32, the "
            'optimizer is SGD, partitions are chosen by `"auto"`, and computing a gradient takes no time. An '
            "all-reduce is the wire alone, as with gloo.",
            "",
            table(
                ["model", "Gbit/s", "hosts", "partitions", "ms a step", "all-reduce", "busiest"],
                grown,
            ),
            "## Arrangements",
            "",
            f"{model} at {gigabits} Gbit/s, ms a step:",
            "",
            _by_hosts(results["runs"]["compared"]),
            "## Remedies",
            "",
            f"What each change would gain, together with those above it; {model} at {gigabits} Gbit/s, ms a step. Only "
            f"the number of partitions can be set today. Groups of {TOGETHER} workers would share a host.",
            "",
            _by_hosts(results["runs"]["remedies"]),
            "## Measured and simulated",
            "",
            f"The simulated time of {len(ratios)} steps is {ratios[0]:.2f} to {ratios[-1]:.2f} times the measured one, "
            f"with a median of {median(ratios):.2f}. Three others fix what the model does not know of a process. Other "
            "programs ran on the machine; the last column says how many of its cores they used, and simulated work "
            "takes accordingly longer. Losses and slow starts of TCP, and a switch that is full, are not simulated.",
            "",
            table(
                ["model", "nodes", "link", "workers", "measured, ms", "simulated, ms", "ratio", "cores of others"],
                [
                    (
                        step["model"],
                        "on the workers' hosts" if step["beside"] else "one server",
                        f"{step['gigabits']:g} Gbit/s" if step["gigabits"] else "loopback",
                        step["workers"],
                        milliseconds(step["seconds"]),
                        milliseconds(step["simulated"]),
                        f"{step['simulated'] / step['seconds']:.2f}",
                        f"{step['others']:.1f}",
                    )
                    for step in steps
                ],
                text=3,
            ),
        ]
    )


def _by_hosts(found: list[Results]) -> str:
    names = list(dict.fromkeys([run["name"] for run in found]))
    hosts = list(dict.fromkeys([run["hosts"] for run in found]))
    times = {(run["name"], run["hosts"]): milliseconds(run["seconds"]) for run in found}
    rows = [(name, *[times[name, number] for number in hosts]) for name in names]
    return table(["", *[f"{number:,} hosts" for number in hosts]], rows)
