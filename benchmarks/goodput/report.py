"""Writes the page of `make goodput`."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import table

Results = dict[str, Any]
NAMES = ("goodput.json", "goodput.md")
# The least goodput with a kill every 30 seconds on one host: backup workers -> share.
BARS = {0: 0.95, 1: 0.98}
BAR_EVERY = 30
_TORCHFT = "https://github.com/pytorch/torchft"
_MANAGER = f"{_TORCHFT}/blob/35ca8650001acc981bab847c0923c966098fb65f/torchft/manager.py"
_REPORTED = "https://github.com/meta-pytorch/torchft/issues/329"
# The most seconds until a worker is back.
BACK = 1.5


def render(results: Results, drawn: dict[str, str]) -> str:
    """Returns the page as Markdown."""
    del drawn
    machine, crews = results["machine"], results["crews"]
    intervals = sorted({row["every"] for crew in crews for row in crew["rows"]})
    steps, different = (sum(crew[key] for crew in crews) for key in ("steps", "different"))
    bits = "had the same bits in every run" if not different else f"were not the same: **{different} of them differed**"
    return "\n".join(
        [
            "# Goodput\n",
            "This is how much of a training is left if one of its processes is killed (`kill -9`) every "
            f"{' and '.join(f'{every:g}' for every in intervals)} seconds. The parameters of all {steps} steps "
            f"{bits}.\n",
            _rows(crews),
            "*Goodput* is the number of steps in a second, as a share of the same crew's undisturbed runs before and "
            "after. *Lost* is the time for each kill in which no step was made. *Back* is the median time from the "
            "death of a worker until its successor begins a step: the start of Python "
            "and its imports, and the fetch of the parameters. Bars are for one host, with a kill every 30 s.\n",
            f"Each step needs {results['needed']} gradients of 1 MB in float32 from workers that compute for 0.1 s, "
            "and AdamW updates the parameters. A backup worker is one more than a step needs. Workers and chief, or "
            "the equal processes of a `Training`, of which one leads, run under `redisacc run`: on one host with its "
            "`--server`; on a cluster of three masters, each with a replica and a reducer, `min_replicas=1` and nodes "
            "that count as failed after 5 s. A reducer that is killed is started again at once; a node when its "
            "replica has taken its place.\n",
            "For comparison: torchft's operations time out after 60 s by default "
            f"([`torchft/manager.py`]({_MANAGER})), and a user reports 948 s from a fault until the replica group of "
            f"Llama 3 8B trained again ([issue 329]({_REPORTED})). The models differ, so these are no measurements "
            "beside ours: a larger model takes longer to fetch and to load here as well.\n",
            f"Written by `make goodput`{_options(results)} on {results['when'][:10]} in {results['seconds']} s on "
            f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_before']:.1f} before the run; "
            f"[{NAMES[0]}]({NAMES[0]}) holds every figure. Other programs ran on this machine, so undisturbed "
            f"runs differ: by {max(_spread(crew) for crew in crews):.1%} at most.\n",
        ]
    )


def _options(results: Results) -> str:
    return f' (`G="{results["options"]}"`)' if results["options"] else ""


def _rows(crews: list[Results]) -> str:
    rows = []
    for crew in crews:
        where = "a cluster" if crew["cluster"] else "one host, `Training`" if crew["training"] else "one host"
        crowd = f"{where}, one backup worker" if crew["backup"] else where
        for row in crew["rows"]:
            bar = BARS[crew["backup"]] if not crew["cluster"] and row["every"] == BAR_EVERY else None
            missed = bar is not None and row["goodput"] < bar
            back = row["back"]
            rows.append(
                [
                    crowd,
                    row["victim"],
                    f"{row['every']:g} s",
                    f"{row['kills']}",
                    f"{row['goodput']:.1%}",
                    "" if bar is None else f"**{bar:.0%}, missed**" if missed else f"{bar:.0%}",
                    f"{row['lost']:.2f} s",
                    "" if back is None else f"{back:.2f} s" if back <= BACK else f"**{back:.2f} s**",
                ]
            )
    return table(["crew on", "killed", "every", "kills", "goodput", "bar", "lost", "back"], rows, text=2)


def _spread(crew: Results) -> float:
    first, last = crew["undisturbed"]
    return abs(first - last) / max(first, last)
