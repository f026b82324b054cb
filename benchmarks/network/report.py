"""Writes the page of `make bench-network`: what was measured, as tables, with the plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.markdown import between, figure, head, ms, picture, short, table, times, versions
from benchmarks.network.update_report import bars, choice, overlaps, updates

Results = dict[str, Any]

NAMES = ("network.json", "network.md")
# The plot of growth shows this row.
GROWING = "dense-4MB"
# The plot and the lines at the top of the page show this network, if it was measured: its rate and number of workers.
CONCLUDED = (1, 4)

# The bars of rounds at 1 Gbit/s, as ratios to TensorFlow's time: row, number of workers, and what travels -> the bar.
# The bar of float32 may be reached with a reducer or without.
_SPARSE_BARS = {"sparse-10x16-of-1000": 5, "sparse-1000x64-of-10000": 1.3, "sparse-10000x64-of-100000": 1.5}
BARS = {
    **{(row, workers, "float32"): bar for row, bar in _SPARSE_BARS.items() for workers in (4, 8)},
    **{(row, 4, "float32"): 1.15 for row in ("dense-4MB", "dense-32MB")},
    **{(row, 8, "float32"): 1.05 for row in ("dense-4MB", "dense-32MB")},
    **{(row, workers, "bfloat16"): 2 for row in ("dense-4MB", "dense-32MB") for workers in (4, 8)},
    **{(row, workers, "int8"): 3.5 for row in ("dense-4MB", "dense-32MB") for workers in (4, 8)},
}


def render(results: Results, drawn: dict[str, str]) -> str:
    """Returns the page as Markdown."""
    networks = results["networks"]
    conclusion = _conclusion(results, drawn)
    parts = [
        head(results, "Performance between machines", "make bench-network", NAMES[0], conclusion),
        _network(results),
    ]
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
        if any("updates" in network for network in here):
            parts += [f"## A training step with an optimizer at {title}\n", _UPDATES, updates(here)]
        if any("overlap" in network for network in here):
            parts += [f"## Overlap with a backward pass at {title}\n", _OVERLAP, overlaps(here)]
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


_UPDATES = (
    "The same step with `Chief(optimizer=...)` and reducers, which update the parameters where the sums are: a model "
    "of 100 dense arrays, plain SGD. In the arrangements, each node of a Redis Cluster, or the one server, has its "
    "reducer on its host, and the chief runs on the first worker's. *rounds()* has its update in a chief on a host of "
    "its own. torch's ranks reduce all gradients in one `all_reduce`, and each makes the same update. *Limit* is the "
    "least time in which the links can carry the step: with a node on each host of n workers and on k others, "
    "2n(n-1)M / ((n² + kn - 2k)B) for M bytes and links of B (BytePS, OSDI 2020); with k servers on hosts of their own "
    "nM / kB, or M / B if that is more. The ratios say how many times as long the others take.\n"
)
_OVERLAP = (
    "The same step, with a node on each worker's host, when workers have a backward pass: they sleep between the "
    "leaves, from the last to the first, for as long as a link needs to send the gradient. The gradient leaves by "
    "`apply()` after the pass, or by `begin()`, `put()` and `commit()` during it. A step without a pass is an upload "
    "and a download, so the *ratio* to it is the step's time divided by max(backward pass, upload) + download.\n"
)


def _network(results: Results) -> str:
    networks = results["networks"]
    control = " and ".join(dict.fromkeys(network["congestion_control"] for network in networks))
    left_out = "".join(f"\nNot measured: {reason}.\n" for reason in results["left_out"])
    options = f" Options of this run: `{results['options']}`." if results["options"] else ""
    for run in results.get("added", ()):
        what = "A quick run with few rounds" if run["quick"] else "A run"
        load = run["machine"]["load_before"]
        options += (
            f" {what} on {run['when'][:10]}, with a load of {load:.1f} before it, measured what its options name: "
            f"`{run['options']}`."
        )
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


def _encoding(key: str) -> str:
    """Returns what gradients of a peer travel as."""
    return next((encoding for encoding in ("bfloat16", "int8") if encoding in key), "float32")


def _bar(network: Results, name: str, key: str) -> float | None:
    """Returns the bar of a peer of a row; None if it has none."""
    if network["gigabits"] != 1 or not key.startswith("redisacc"):
        return None
    return BARS.get((name, network["workers"], _encoding(key)))


def _concluded(results: Results) -> Results | None:
    """Returns the network that the top of the page is about; None if TensorFlow was not measured on it."""
    for network in results["networks"]:
        rows = _rows(network, weights=False).values()
        if (network["gigabits"], network["workers"]) == CONCLUDED and any("tensorflow" in row["peers"] for row in rows):
            return network
    return None


def _conclusion(results: Results, drawn: dict[str, str]) -> str:
    """Returns which arrangement to choose, and a few lines and a plot about one network, if it was measured."""
    chosen = choice(results["networks"])
    network = _concluded(results)
    if network is None:
        return "\n".join([*chosen, ""])
    rows = _rows(network, weights=False)
    lines = [
        *chosen,
        "\nRatios say how many times as long the other one takes: above 1, redisacc is faster. "
        f"{network['workers']} workers, a chief and a server on hosts of their own, with links of "
        f"{network['gigabits']:g} Gbit/s.\n",
    ]
    ways = {key: name for key, name in network["names"].items() if key.startswith("redisacc")}
    texts = []
    for what, encoded in (("", False), ("with fewer bytes ", True)):
        found = [
            f"{kind} gradients {between(values)}{name.removeprefix('redisacc').replace(',', ' with', 1)}"
            for key, name in ways.items()
            if (_encoding(key) != "float32") == encoded
            for kind in ("sparse", "dense")
            if (values := [figure(row["ratios"][key]) for row in _of_kind(rows, kind, key)])
        ]
        if found:
            texts.append(f"{what}{', '.join(found)}")
    if texts:
        lines.append(f"- **A round compared with TensorFlow's parameter server:** {'; '.join(texts)}.")
    best = [
        figure(row["ratios"][key]) / figure(row["ratios"]["gloo"])
        for row in _of_kind(rows, "dense", "gloo")
        if (key := _best(row, "float32")) is not None
    ]
    if best:
        lines.append(
            f"- **A round compared with torch's all_reduce over gloo:** dense gradients of float32 {between(best)}; it "
            "needs no server, and every link carries a part."
        )
    reached = [one for found in results["networks"] for name in found["rows"] for one in _reached(found, name)]
    reached += bars(results["networks"])
    if reached:
        lines.append(
            f"- **Targets:** {sum(reached)} of {len(reached)} bars are reached, over all numbers of workers. The "
            "tables mark those that are missed."
        )
    return "\n".join([*lines, "", picture(drawn, "Conclusion")])


def _of_kind(rows: Results, kind: str, key: str) -> list[Results]:
    return [row for name, row in rows.items() if name.startswith(kind) and key in row["ratios"]]


def _best(row: Results, encoding: str) -> str | None:
    """Returns which of redisacc's ways is fastest, with or without a reducer; None if none was measured."""
    ways = [key for key in row["ratios"] if key.startswith("redisacc") and _encoding(key) == encoding]
    return max(ways, key=lambda key: figure(row["ratios"][key]), default=None)


def _reached(network: Results, name: str) -> list[bool]:
    """Returns for each bar of a row whether the fastest of redisacc's ways reaches it."""
    row, found = network["rows"][name], []
    for encoding in ("float32", "bfloat16", "int8"):
        key = _best(row, encoding)
        if key is not None and (bar := _bar(network, name, key)) is not None:
            found.append(figure(row["ratios"][key]) >= bar)
    return found


def _rows(network: Results, *, weights: bool) -> dict[str, Results]:
    return {name: row for name, row in network["rows"].items() if name.startswith("weights-") == weights}


def _merged(networks: list[Results], what: str) -> dict[str, Any]:
    return {key: value for network in networks for key, value in network[what].items()}


def _rounds(networks: list[Results], rate: float, *, weights: bool) -> str:
    names = _merged(networks, "names")
    order = list(_merged(networks, "rows"))
    found = [(name, network) for network in networks for name in _rows(network, weights=weights)]
    figures, costs = [], []
    for name, network in sorted(found, key=lambda one: order.index(one[0])):
        row, workers = network["rows"][name], network["workers"]
        # Only the first line of a round repeats what all of them have in common.
        first = [name, f"{workers}", short(workers * row["bytes_of_a_gradient"] * 8 / rate / 1e6)]
        for key, peer in row["peers"].items():
            ratio = times(row["ratios"][key]) if key in row["ratios"] else ""
            figures.append(
                [first[0], names[key], *first[1:], ms(peer["seconds"]), ratio, _bar_text(network, name, key)]
            )
            costs.append([first[0], names[key], first[1], *_costs(peer)])
            first = ["", "", ""]
    columns = ["", "", "W", "wire, ms", "ms", "ratio", "bar"]
    if not any(line[-1] for line in figures):
        columns, figures = columns[:-1], [line[:-1] for line in figures]
    parts = ["The ratio says how many times as long TensorFlow takes.\n", table(columns, figures, text=2)]
    if not weights:
        parts += [
            "MB of a round on the links of server and taker, packets that ports have dropped, and the most memory in "
            "MB: the taker's beyond what it used before the round, and all of the server's processes. TensorFlow "
            "and torch keep memory from earlier rounds, so the figures of their takers are too small.\n",
            table(
                ["", "", "W", "to server", "from it", "to taker", "dropped", "taker", "server"],
                costs,
                text=2,
            ),
        ]
    return "\n".join(parts)


def _bar_text(network: Results, name: str, key: str) -> str:
    """Returns the bar of a peer, and that it is missed if none of redisacc's ways reaches it."""
    row, bar = network["rows"][name], _bar(network, name, key)
    if bar is None or key != _best(row, _encoding(key)):
        return ""
    return f"{bar:g}x" if figure(row["ratios"][key]) >= bar else f"**{bar:g}x, missed**"


def _costs(peer: Results) -> list[str]:
    totals, peaks = peer["totals_a_round"], peer.get("peak_memory", {})
    # All of a torch round's bytes take other links; a few acknowledgements are nothing.
    megabytes = [short(round(totals[name] / 1e6, 3)) for name in ("server_in", "server_out", "taker_in")]
    memory = ["" if peaks.get(who) is None else short(round(peaks[who] / 1e6, 3)) for who in ("taker", "server")]
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
    if (concluded := _concluded(results)) is not None:
        found["Conclusion"] = plots.paint_file(
            out, "network-conclusion", lambda _, axes: _ratios(axes[0], concluded), 1, (9, 3.4)
        )
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


def _ratios(axis: Any, network: Results) -> None:
    """Draws for each row how many times as long TensorFlow takes as each of redisacc's ways, and the bars as lines."""
    rows = _rows(network, weights=False)
    ways = [key for key in network["names"] if key.startswith("redisacc")]
    width = 0.8 / len(ways)
    for place, key in enumerate(ways):
        shift = (place - (len(ways) - 1) / 2) * width
        known = [(k + shift, name, row) for k, (name, row) in enumerate(rows.items()) if key in row["ratios"]]
        values = [figure(row["ratios"][key]) for _, _, row in known]
        axis.bar([x for x, _, _ in known], values, width * 0.92, label=network["names"][key])
        for x, name, row in known:
            bar = _bar(network, name, key)
            if bar is not None and key == _best(row, _encoding(key)):
                axis.plot([x - width / 2, x + width / 2], [bar] * 2, color="black", lw=1.5)
    plots.label_ratios(axis, rows)


def _growth(axes: Any, networks: list[Results], names: dict[str, str]) -> None:
    """Draws time, bytes from the server, and the taker's memory, over the number of workers."""
    rows = {network["workers"]: network["rows"][GROWING] for network in networks}
    wire = {w: w * row["bytes_of_a_gradient"] * 8 / networks[0]["gigabits"] / 1e6 for w, row in rows.items()}
    for key, name in names.items():
        peers = {w: row["peers"][key] for w, row in rows.items() if key in row["peers"]}
        if not peers:
            continue
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
