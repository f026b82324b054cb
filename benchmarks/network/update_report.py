"""Writes what was measured of a training step with an optimizer: which arrangement to choose, and a table."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import ms, short, table, times
from benchmarks.network.arrangements import PEERS, Arrangement
from benchmarks.stats import ratio

Results = dict[str, Any]
# A model, a number of workers, and the median seconds of each peer's step.
Section = tuple[str, int, dict[str, float]]

# What the project's arrangements are compared with, and the limit of all of them.
OTHERS = {"tensorflow": "TensorFlow", "gloo": "gloo"}
# The number of workers whose times the page quotes at its top, if it was measured.
QUOTED = 4
# The bars at 1 Gbit/s with 4 workers: model and peer -> TensorFlow's time divided by ours, and gloo's.
BARS: dict[tuple[str, str], dict[str, float]] = {
    ("updates-4MB", "nodes"): {"tensorflow": 2.8, "gloo": 0.65},
    ("updates-4MB", "nodes-bfloat16"): {"tensorflow": 4.8, "gloo": 1.1},
    ("updates-4MB", "one"): {"tensorflow": 1.25},
    ("updates-4MB", "one-bfloat16"): {"tensorflow": 2.2},
    ("updates-31MB", "nodes"): {"tensorflow": 3.4, "gloo": 0.72},
    ("updates-31MB", "nodes-bfloat16"): {"tensorflow": 6, "gloo": 1.3},
    ("updates-31MB", "one"): {"tensorflow": 1.5},
    ("updates-31MB", "one-bfloat16"): {"tensorflow": 2.8},
}
# The most that a streamed step may take at 1 Gbit/s, as a multiple of the longer of backward pass and upload plus the
# download. The pass takes as long as the upload, so this is a multiple of the step without a pass.
OVERLAP_BAR = 1.15


def choice(networks: list[Results]) -> list[str]:
    """Returns a line for each rate that says which arrangement to choose; no lines if too few were measured.

    It is the one whose steps in float32 are the fastest in relation to the other arrangements', over all models and
    numbers of workers. Only times with ``QUOTED`` workers are quoted.
    """
    lines = []
    for rate in dict.fromkeys(network["gigabits"] for network in networks):
        sections = [
            (
                model,
                network["workers"],
                {key: float(peer["seconds"]["median"]) for key, peer in section["peers"].items()},
            )
            for network in networks
            if network["gigabits"] == rate
            for model, section in network.get("updates", {}).items()
        ]
        names = {
            key: peer.name
            for key, peer in PEERS.items()
            if isinstance(peer, Arrangement) and peer.encoding == "float32"
        }
        sections = [section for section in sections if sum(key in section[2] for key in names) > 1]
        ways = [key for key in names if sections and all(key in medians for *_, medians in sections)]
        if not ways:
            continue

        def slowness(key: str, sections: list[Section] = sections, ways: list[str] = ways) -> float:
            return sum(medians[key] / min(medians[one] for one in ways) for *_, medians in sections)

        best = min(ways, key=slowness)
        quoted = [section for section in sections if section[1] == QUOTED] or sections
        texts = [
            f"{model.removeprefix('updates-')}, {workers} workers: {_times(medians, best)}"
            for model, workers, medians in quoted
        ]
        lines.append(
            f"- **At {rate:g} Gbit/s, choose {names[best]}** for a training with an optimizer. Milliseconds a step of "
            f"{'; '.join(texts)}."
        )
    return lines


def _times(medians: dict[str, float], best: str) -> str:
    """Returns the times of an arrangement and of what it is compared with, in float32 and bfloat16."""
    texts = []
    for encoding, ending in (("float32", ""), ("bfloat16", "-bfloat16")):
        if best + ending not in medians:
            continue
        others = {"one" + ending: "one server"} | ({} if ending else OTHERS)
        compared = [
            f"{name} {1e3 * medians[key]:.0f}"
            for key, name in others.items()
            if key in medians and key != best + ending
        ]
        texts.append(
            f"{encoding} {1e3 * medians[best + ending]:.0f}" + (f" ({', '.join(compared)})" if compared else "")
        )
    return ", ".join(texts)


def bars(networks: list[Results]) -> list[bool]:
    """Returns for each bar whether it is reached."""
    return [
        reached
        for network in networks
        for model, section in network.get("updates", {}).items()
        for key in section["peers"]
        for _, reached in _bars(network, model, key)
    ] + [
        _overlap_ratio(section, "streamed") <= OVERLAP_BAR
        for network in networks
        if network["gigabits"] == 1
        for section in network.get("overlap", {}).values()
        if "streamed" in section["peers"]
    ]


def _bars(network: Results, model: str, key: str) -> list[tuple[float, bool]]:
    """Returns the bars of a peer, and whether it reaches them."""
    if (network["gigabits"], network["workers"]) != (1, 4):
        return []
    peers = network["updates"][model]["peers"]
    return [
        (bar, ratio(peers[other]["blocks"], peers[key]["blocks"])["of_medians"] >= bar)
        for other, bar in BARS.get((model, key), {}).items()
        if other in peers
    ]


def updates(networks: list[Results]) -> str:
    """Returns a table of all steps."""
    rows = []
    for network in networks:
        for model, section in network.get("updates", {}).items():
            peers, first = section["peers"], [model, f"{network['workers']}"]
            for key, peer in peers.items():
                ratios = [
                    times(ratio(peers[other]["blocks"], peer["blocks"])) if other in peers and other != key else ""
                    for other in OTHERS
                ]
                bar = ", ".join(
                    f"{bar:g}x" if there else f"**{bar:g}x, missed**" for bar, there in _bars(network, model, key)
                )
                links = {link: value for link, value in peer["server_a_step"].items() if link != "dropped"}
                busiest = short(round(max(links.values(), default=0.0) / 1e6, 3))
                limit = short(round(1e3 * peer["wire_seconds"], 1))
                rows.append([first[0], peer["name"], first[1], limit, ms(peer["seconds"]), *ratios, bar, busiest])
                first = ["", ""]
    columns = [
        "",
        "",
        "W",
        "limit, ms",
        "step, ms",
        *(f"to {name}" for name in OTHERS.values()),
        "bars",
        "busiest link, MB",
    ]
    return table(columns, rows, text=2)


def overlaps(networks: list[Results]) -> str:
    """Returns a table of all steps with a backward pass."""
    rows = []
    for network in networks:
        for model, section in network.get("overlap", {}).items():
            first = [model, f"{network['workers']}", short(round(1e3 * section["backward_seconds"], 1))]
            for key, peer in section["peers"].items():
                found = _overlap_ratio(section, key)
                bar = ""
                if key == "streamed" and network["gigabits"] == 1:
                    bar = f"{OVERLAP_BAR:g}" if found <= OVERLAP_BAR else f"**{OVERLAP_BAR:g}, missed**"
                rows.append([first[0], peer["name"], *first[1:], ms(peer["seconds"]), f"{found:.2f}", bar])
                first = ["", "", ""]
    return table(["", "", "W", "backward pass, ms", "step, ms", "ratio", "bar"], rows, text=2)


def _overlap_ratio(section: Results, key: str) -> float:
    """Returns a step's time as a multiple of the longer of backward pass and upload plus the download."""
    medians = [float(section["peers"][one]["seconds"]["median"]) for one in (key, "no-pass")]
    return medians[0] / medians[1]
