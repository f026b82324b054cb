"""Compares settings in simulated runs, and draws the plots of docs/guides/stragglers.md: ``make simulate``.

Prints the tables of that page and of asynchronous-training.md. Nothing is measured: the clock is simulated, and the
same seeds give the same bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.plots import paint_file, plain
from benchmarks.simulation import Array, Outcome, Problem, Setting, Training
from redisacc import Quorum

ROOT = Path(__file__).resolve().parents[1]
SECONDS, SEEDS = 240, 40
# When the loss is compared, in seconds.
EARLY, LATE = 30, 240
# Over how many seconds the loss is averaged, because it goes up and down from step to step.
SMOOTH = 10
# The losses that the plot shows: all settings begin alike.
RANGE = 2e-4, 2e-2


@dataclass(frozen=True)
class Panel:
    """A panel of a plot: settings that are compared, by label, all at one learning rate."""

    settings: dict[str, Setting]
    rate: float = Problem().rate


LATE_ONES = {
    "n = 6, none late": Setting(6),
    "n = 4, 1 step late": Setting(4, max_staleness=1),
    "n = 4, 4 steps late": Setting(4, max_staleness=4),
    "n = 1, 4 steps late": Setting(1, max_staleness=4),
    "n = 1, any": Setting(1, max_staleness=None),
    "n = 1, any, inverse_sqrt": Setting(1, max_staleness=None, staleness_weight="inverse_sqrt"),
}
# Name of the file → its panels, by title.
PLOTS: dict[str, dict[str, Panel]] = {
    "choosing-waits": {
        "How many of 8 (n)": Panel(
            {f"n = {number}": Setting(number) for number in (8, 7, 6, 4, 1)},
        ),
        "For how long to wait (grace)": Panel(
            {
                "n = 8": Setting(8),
                'workers = "all"': Setting(4, "all"),
                '"all", grace 1 s': Setting(Quorum(4, grace=1.0), "all"),
                "n = 6, up to 8 in 0.5 s": Setting(Quorum(6, 8, 0.5)),
                "n = 6, up to 8 in 10 s": Setting(Quorum(6, 8, 10.0)),
            }
        ),
    },
    "choosing-staleness": {
        "How late (max_staleness)": Panel(LATE_ONES),
        "The same at a learning rate 1.5 times as high": Panel(LATE_ONES, rate=1.5 * Problem().rate),
    },
}

Results = dict[str, list[Outcome]]


def simulate(panel: Panel, seeds: int, seconds: float) -> Results:
    """Returns the outcomes of every setting of a panel, one for each seed, by label."""
    problem = Problem(rate=panel.rate)
    return {
        label: [Training(setting, seed, problem=problem).run(seconds) for seed in range(seeds)]
        for label, setting in panel.settings.items()
    }


def smooth_loss(outcomes: Sequence[Outcome], seconds: float) -> Array:
    """Returns the median over the seeds of the loss at each second, averaged over the last ``SMOOTH`` of them."""
    median = np.median([outcome.at(np.arange(seconds + 1)) for outcome in outcomes], axis=0)
    return np.array([median[max(0, second - SMOOTH + 1) : second + 1].mean() for second in range(len(median))])


def paint(figure: Any, axes: Any, results: dict[str, Results], seconds: float) -> None:
    """Draws the loss over time, a panel for each title."""
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1, wspace=0.03)
    for axis, (title, outcomes) in zip(axes, results.items(), strict=True):
        for label, found in outcomes.items():
            axis.plot(smooth_loss(found, seconds), label=label, lw=1.4)
        axis.set(title=title, xlabel="seconds", yscale="log", xlim=(0, seconds), ylim=RANGE)
        plain(axis.yaxis)
        axis.legend(fontsize=8)
    axes[0].set_ylabel(f"loss (median of {len(found)} runs)")


def table(results: Results) -> str:
    """Returns what every setting did, as a table of the page."""
    lines = [
        f"| setting | steps | gradients used | dropped | 1000 x loss after {EARLY} s | after {LATE} s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for label, found in results.items():
        steps, used, stale = np.mean([(len(one.times) - 1, one.used, one.stale) for one in found], axis=0)
        losses = 1000 * smooth_loss(found, LATE)[[EARLY, LATE]]
        early, late = (f"{loss:.2f}" if loss < 100 else "diverges" for loss in losses)
        lines.append(f"| {label} | {steps:.0f} | {used:.0f} | {stale:.0f} | {early} | {late} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="folder of the plots")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of runs of each setting")
    options = parser.parse_args(arguments)
    for name, panels in PLOTS.items():
        results = {title: simulate(panel, options.seeds, SECONDS) for title, panel in panels.items()}
        for title, outcomes in results.items():
            print(f"{title}\n\n{table(outcomes)}\n")

        def draw(figure: Any, axes: Any, results: dict[str, Results] = results) -> None:
            paint(figure, axes, results, SECONDS)

        paint_file(options.out, name, draw, panels=len(panels), size=(9, 3.8))


if __name__ == "__main__":
    main()
