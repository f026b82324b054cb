"""Writes the page of `make comparison`."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.comparison.crew import GPT, OURS
from benchmarks.comparison.measure import ALONE, WORKERS, changes
from benchmarks.markdown import table

Results = dict[str, Any]
NAMES = ("comparison.json", "comparison.md")
TITLES = {ALONE: "one process", OURS: "redisacc", "ddp": "DDP over gloo", "horovod_form": "Horovod"}
TITLES_OF_GPT = {GPT + name: TITLES[name] for name in (ALONE, OURS, "ddp")}
# torch's optimizers to compare: redisacc has a counterpart of the first only. And the largest difference of weights.
OPTIMIZERS = ("AdamW", "Adafactor")
MOST = 1e-5
# The most lines that may change.
BAR = 4
_CODE = "https://github.com/redisacc/redisacc/blob/main/benchmarks/comparison"
_HOROVOD = "https://github.com/horovod/horovod/blob/v0.28.1"
_TORCHRUN = "https://docs.pytorch.org/docs/stable/elastic/run.html"


def render(results: Results, drawn: dict[str, str]) -> str:
    """Returns the page as Markdown."""
    del drawn
    machine, programs = results["machine"], results["programs"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return "\n".join(
        [
            "# The same training three ways\n",
            f"A loop of PyTorch in one process ([`alone.py`]({_CODE}/alone.py)) is changed so that several processes "
            "train together, and one of them is killed (`kill -9`).\n",
            table(_heads(results), [_row(name, results) for name in TITLES], text=1),
            *_kills(programs),
            "The model classifies scikit-learn's 1,797 digits: three layers, 301,066 parameters (1.2 MB) and AdamW. "
            "Each process uses 32 images in a step, and an epoch has 1,536; the others are for the test. An epoch is "
            f"the median of a run of {results['epochs']}, without the first one, and the fastest of "
            f"{results['repeats']} runs counts, because other programs used the machine. The programs took turns. For "
            "such a small model, a step is mostly messages. The processes of redisacc are started by `redisacc run`, "
            "on one host with a server, and on several with a node and a reducer on each. The hosts are network "
            "namespaces that share the processor. With one server and two processes, 11 MB pass through the server in "
            "each step: gradients in and out, weights in and out to each process, and AdamW's state in. Horovod was "
            "not measured, because its package has to be compiled; its lines are those of its documentation.\n",
            *_differences(TITLES),
            *(_gpt(results) if "gpt" in results["models"] else []),
            f"Written by `make comparison`{_options(results)} on {results['when'][:10]} in {results['seconds']} s on "
            f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_before']:.1f} before the run; "
            f"[{NAMES[0]}]({NAMES[0]}) holds every figure. {versions}.\n",
        ]
    )


def _options(results: Results) -> str:
    return f' (`B="{results["options"]}"`)' if results["options"] else ""


def _heads(results: Results) -> list[str]:
    heads = ["", "lines that change", f"an epoch, {WORKERS} processes on one host"]
    if results["hosts"]:
        heads.append(f"an epoch, {results['hosts']} hosts at {results['rate']:g} Gbit/s")
    return [*heads, "accuracy"]


def _row(name: str, results: Results) -> list[str]:
    found = results["programs"][name]
    missed = name.endswith(OURS) and found["lines"] > BAR
    lines = f"**{found['lines']}, at most {BAR} wanted**" if missed else f"{found['lines']}"
    places = ["one_host", "between_hosts"] if results["hosts"] else ["one_host"]
    cells = [_epoch(found[place]) for place in places]
    accuracy = f"{found['accuracy']:.1%}" if found["accuracy"] is not None else "not run"
    return [{**TITLES, **TITLES_OF_GPT}[name], "" if name.endswith(ALONE) else lines, *cells, accuracy]


def _epoch(runs: list[list[float]]) -> str:
    return f"{min(map(statistics.median, runs)):.2f} s" if runs else ""


def _kills(programs: Results) -> list[str]:
    ours, ddp = programs[OURS]["kill"], programs["ddp"]["kill"]
    return [
        "One of two processes is killed after its first epoch:\n",
        f"- **redisacc:** {_ours(ours, programs[OURS]['weights'])}",
        f"- **DDP:** {_theirs(ddp)} A process cannot join again by itself: `torchrun` [restarts all of them]"
        f"({_TORCHRUN}), from the program's own checkpoint.",
        "- **Horovod**, according to its code and documentation: `horovodrun` [terminates all workers when any fails]"
        f"({_HOROVOD}/horovod/runner/gloo_run.py#L136). Elastic Horovod [continues]({_HOROVOD}/docs/elastic.rst) from "
        "the last commit in memory, for more changes in the program: a state object, a decorated function and commits.",
        "",
    ]


def _ours(kill: Results, undisturbed: str) -> str:
    if not kill["weights"]:
        return "**the training did not come to its end.**"
    if kill["weights"] != [undisturbed]:
        return f"**the processes end with other weights than without a kill: {', '.join(kill['weights'])}.**"
    return (
        f"`redisacc run` restarts it. The other one waits {kill['pause']:.1f} s for it, most of which is the start "
        "of Python and torch. Both end with the weights of an undisturbed run, bit for bit."
    )


def _theirs(kill: Results) -> str:
    if kill["ended"] is None:
        return "the other one waits without an end."
    return f"the other one ends after {kill['ended']:.1f} s (“{kill['error']}”)."


def _differences(titles: dict[str, str]) -> list[str]:
    return [
        text
        for name, title in titles.items()
        if not name.endswith(ALONE)
        for text in (f"## {title}\n", "```diff", *changes(name), "```", "")
    ]


def _modes(modes: list[Results]) -> list[str]:
    rows = [
        [
            each["optimizer"],
            str(each["fused"]),
            f"{1000 * each['seconds']:.0f}",
            f"{each['bytes'] / 1e6:.0f}",
            "" if each["back"] is None else f"{each['back']:.1f}",
        ]
        for each in modes
    ]
    heads = ["", "`fused=`", "ms a step", "MB through the server in a step", "seconds until a killed process is back"]
    text = f"Both ways of making the update, {WORKERS} processes on one host, float32, one group:\n"
    return [text, table(heads, rows, text=1), ""] if rows else []


def _gpt(results: Results) -> list[str]:
    ours = results["programs"][GPT + OURS]
    differences = "; ".join(
        f"with {name} {found:.1e}" if found <= MOST else f"**with {name} {found:.1e}, at most {MOST:g} wanted**"
        for name, found in results["differences"].items()
    )
    return [
        "# A GPT\n",
        "3.3 million parameters (13 MB), bfloat16 autocast, AdamW with two groups, warm-up, a cosine and clipping, "
        "8 pieces of 64 bytes for each process in a step.\n",
        table(_heads(results), [_row(name, results) for name in TITLES_OF_GPT], text=1),
        f"After a kill, **redisacc:** {_ours(ours['kill'], ours['weights'])} DDP: "
        f"{_theirs(results['programs'][GPT + 'ddp']['kill'])}\n",
        "The largest difference between weights of two processes, and of one with batches twice as large, in float32: "
        f"{differences}.\n",
        *_modes(results.get("modes", [])),
        *_differences({name: f"{title}, GPT" for name, title in TITLES_OF_GPT.items()}),
    ]
