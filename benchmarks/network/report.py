"""Writes the page of `make bench-network`: what was measured, as tables, with the plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.markdown import head, ms, picture, short, table, times, versions

Results = dict[str, Any]

NAMES = ("network.json", "network.md")
# The plot of growth shows this row.
GROWING = "dense-4MB"


def render(results: Results, drawn: dict[str, str]) -> str:
    """Returns the page as Markdown."""
    networks = results["networks"]
    parts = [head(results, "Performance between machines", "make bench-network", NAMES[0]), _network(results)]
    for rate in dict.fromkeys(network["gigabits"] for network in networks):
        here = [network for network in networks if network["gigabits"] == rate]
        title = f"{rate:g} Gbit/s"
        parts += [f"## Rounds at {title}\n"]
        parts += [text for name in (title, f"Growth at {title}") if (text := picture(drawn, name))]
        parts.append(_rounds(here, rate, weights=False))
        if any(_rows(network, weights=True) for network in here):
            parts += [f"## Weights at {title}\n", _WEIGHTS, _rounds(here, rate, weights=True)]
        if any("steps" in network for network in here):
            parts += [f"## A training step at {title}\n", _STEPS, _steps(here)]
    parts += ["## Versions\n", versions({"versions": _merged(networks, "versions")})]
    return "\n".join(parts)


_WEIGHTS = (
    "One process publishes an array and W others wait for it. The time ends when all of them have it. Processes that "
    "use redisacc get it by `Parameters.publish` and `wait`, those of TensorFlow by a variable on the parameter server "
    "and a token, and torch's by a broadcast.\n"
)
_STEPS = (
    "Gradients, their mean, the update and the new weights of a model of 100 arrays; time until every worker has the "
    "next weights. redisacc uses `TreeAccumulator` and `Parameters`. TensorFlow updates its variables on the parameter "
    "server, so neither gradients nor weights pass through its chief's link. [Performance](README.md) describes the "
    "peers.\n"
)


def _network(results: Results) -> str:
    networks = results["networks"]
    control = " and ".join(dict.fromkeys(network["congestion_control"] for network in networks))
    left_out = "".join(f"\nNot measured: {reason}.\n" for reason in results["left_out"])
    options = f" Options of this run: `{results['options']}`." if results["options"] else ""
    return (
        "W workers, one taker and one server are hosts of their own: network namespaces of one machine, each with one "
        "link to a switch. Each end of a link sends at the rate of the link and queues what does not fit for at most "
        f"{results['queue_ms']} ms; then packets are lost. TCP's congestion control is {control}, as the machine has "
        "it. All hosts share the machine's processors, so at 10 Gbit/s, and with many workers, the processors are "
        "often the limit.\n"
        "\n"
        "Rounds are those of [Performance](README.md): they begin when the workers get their signal, and end when the "
        "taker has the mean as numpy arrays. Redis servers write nothing to disk. *Wire* is the time that W gradients "
        "need on the server's link. *Bare sockets* send and add the same bytes through a server, without guarantees; "
        "with a *reducer*, a process beside the server adds piece by piece while the workers are still sending. "
        "redisacc's is `redisacc reduce`, over the server's Unix socket. "
        "*bfloat16* and *int8* name the encoding of gradients on the wire, and of weights if it is bfloat16; their "
        "results may differ from numpy's by what that rounds. torch's `all_reduce` has no server: each rank sends and "
        "receives about two gradients, whatever W is. Each "
        f"peer has 21 rounds in three alternations, unless the page says that the run was quick.{options}\n{left_out}"
    )


def _rows(network: Results, *, weights: bool) -> dict[str, Results]:
    return {name: row for name, row in network["rows"].items() if name.startswith("weights-") == weights}


def _merged(networks: list[Results], what: str) -> dict[str, Any]:
    return {key: value for network in networks for key, value in network[what].items()}


def _rounds(networks: list[Results], rate: float, *, weights: bool) -> str:
    names = _merged(networks, "names")
    found = [
        (name, network["workers"], row) for network in networks for name, row in _rows(network, weights=weights).items()
    ]
    keys = [key for key in names if any(key in row["peers"] for _, _, row in found)]
    medians, ratios, costs = [], [], []
    order = list(_merged(networks, "rows"))
    for name, workers, row in sorted(found, key=lambda one: order.index(one[0])):
        first = [name, f"{workers}", short(workers * row["bytes_of_a_gradient"] * 8 / rate / 1e6)]
        peers = row["peers"]
        medians.append([*first, *(ms(peers[key]["seconds"]) if key in peers else "" for key in keys)])
        ratios.append([*first[:2], *(times(row["ratios"][key]) if key in row["ratios"] else "" for key in keys[1:])])
        costs += [[*first[:2], names[key], *_costs(peers[key])] for key in keys if key in peers]
    parts = [table(["ms", "W", "wire", *(names[key] for key in keys)], medians)]
    if len(keys) > 1:
        parts += [f"How many times as long {names[keys[0]]} takes:\n"]
        parts += [table(["", "W", *(names[key] for key in keys[1:])], ratios)]
    if not weights:
        parts += [
            "Bytes of a round on the links of server and taker, packets that ports have dropped, and the most memory: "
            "the taker's beyond what it used before the round, and all memory of the server's processes. TensorFlow "
            "and torch keep memory from earlier rounds, so the figures of their takers are too small.\n",
            table(
                ["", "W", "", "to the server, MB", "from it", "to the taker", "dropped", "taker, MB", "server, MB"],
                costs,
            ),
        ]
    return "\n".join(parts)


def _costs(peer: Results) -> list[str]:
    totals, peaks = peer["totals_a_round"], peer.get("peak_memory", {})
    megabytes = [short(totals[name] / 1e6) for name in ("server_in", "server_out", "taker_in")]
    memory = ["" if peaks.get(who) is None else short(peaks[who] / 1e6) for who in ("taker", "server")]
    return [*megabytes, short(totals["dropped"]), *memory]


def _steps(networks: list[Results]) -> str:
    rows = []
    for network in networks:
        section = network.get("steps", {"peers": {}})
        for key, peer in section["peers"].items():
            ratio = times(section["ratios"][key]) if key in section["ratios"] else ""
            totals = [short(peer["server_a_step"][name] / 1e6) for name in ("server_in", "server_out")]
            rows.append([peer["name"], f"{network['workers']}", ms(peer["seconds"]), ratio, *totals])
    return table(["", "W", "step, ms", "ratio", "to the server, MB", "from it, MB"], rows)


def draw(results: Results, out: Path) -> dict[str, str]:
    """Draws the rounds of each rate, and how they grow with the number of workers; returns title → file name."""
    found = {}
    for rate in dict.fromkeys(network["gigabits"] for network in results["networks"]):
        here = [network for network in results["networks"] if network["gigabits"] == rate]
        title, stem = f"{rate:g} Gbit/s", f"network-{rate:g}"
        names = _merged(here, "names")
        most = max(here, key=lambda network: len(network["rows"]))
        if rows := _rows(most, weights=False):

            def rounds(_: Any, axes: Any, rows: Results = rows, most: Results = most, names: Results = names) -> None:
                plots.bars(axes[0], rows, names)
                axes[0].set_title(f"{most['gigabits']:g} Gbit/s, {most['workers']} workers")

            found[title] = plots.paint_file(out, f"{stem}-rounds", rounds, 1, (9, 4.2))
        curve = [network for network in here if GROWING in network["rows"]]
        if len(curve) > 1:

            def growth(_: Any, axes: Any, curve: list[Results] = curve, names: Results = names) -> None:
                _growth(axes, curve, names)

            found[f"Growth at {title}"] = plots.paint_file(out, f"{stem}-growth", growth, 3, (11, 3.6))
    return found


def _growth(axes: Any, networks: list[Results], names: dict[str, str]) -> None:
    """Draws time, bytes from the server, and the taker's memory, over the number of workers."""
    rows = {network["workers"]: network["rows"][GROWING] for network in networks}
    wire = {w: w * row["bytes_of_a_gradient"] * 8 / networks[0]["gigabits"] / 1e6 for w, row in rows.items()}
    for key, name in names.items():
        peers = {w: row["peers"][key] for w, row in rows.items() if key in row["peers"]}
        axes[0].plot(peers.keys(), [1e3 * peer["seconds"]["median"] for peer in peers.values()], "o-", label=name)
        axes[1].plot(
            peers.keys(), [peer["totals_a_round"]["server_out"] / 1e6 for peer in peers.values()], "o-", label=name
        )
        axes[2].plot(
            peers.keys(), [(peer["peak_memory"]["taker"] or 0) / 1e6 for peer in peers.values()], "o-", label=name
        )
    axes[0].plot(wire.keys(), wire.values(), "--", color="0.5", lw=0.9, label="W gradients on the wire")
    for axis, label in zip(axes, ("ms a round", "from the server, MB", "taker's peak memory, MB"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="workers", ylabel=label, title=GROWING)
        plots.plain(axis.yaxis)
        axis.set_xticks([*rows], [f"{workers}" for workers in rows])
        axis.set_xticks([], minor=True)
    axes[0].legend(fontsize=7)
