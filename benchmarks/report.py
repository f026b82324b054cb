"""Writes the page of `make bench`: what was measured, as tables, with the plots."""

from __future__ import annotations

from typing import Any

from benchmarks import plots
from benchmarks.markdown import between, figure, head, ms, picture, short, table, times, versions
from benchmarks.stats import inverse
from benchmarks.workloads import EMBEDDED_BARS

Results = dict[str, Any]


def render(results: Results, drawn: dict[str, str]) -> str:
    """Returns the report as Markdown."""
    parts = [head(results, "Performance", "make bench", "results.json", _conclusion(results, drawn))]
    for section, make in (
        ("six-rows", _six_rows),
        ("steps", _steps),
        ("others", _others),
        ("limits", _limits),
        ("bound", _bound),
        ("cluster", _cluster),
        ("growth", _growth),
        ("reduction", _reduction),
        ("longest", _longest),
        ("scripts", _scripts),
    ):
        if results.get(section):
            parts.append(make(results[section], drawn))
    return "\n".join(parts)


def _bars(row: Results, name: str) -> list[tuple[str, float, float]]:
    """Returns, for each server that has a bar in a row, its name, its ratio and the bar."""
    found = [("redisacc", EMBEDDED_BARS.get(name)), ("redisacc-memory", row.get("bar"))]
    return [(key, figure(row["ratios"][key]), bar) for key, bar in found if bar is not None and key in row["ratios"]]


def _conclusion(results: Results, drawn: dict[str, str]) -> str:
    """Returns five lines and a plot; nothing if TensorFlow was not measured."""
    rows = results.get("six-rows", {}).get("rows", {})
    if not any("tensorflow" in row["peers"] for row in rows.values()):
        return ""

    def ratios(key: str, kind: str, of: Results = rows) -> list[float]:
        return [
            figure(row["ratios"][key]) for name, row in of.items() if name.startswith(kind) and key in row["ratios"]
        ]

    lines = [
        "Ratios say how many times as long the other one takes: above 1, redisacc is faster. Four workers, one machine."
    ]
    for key, server in (
        ("redisacc", "the embedded server with its defaults"),
        ("redisacc-memory", "a server without disk"),
    ):
        if sparse := ratios(key, "sparse"):
            dense = f", dense ones {between(found)}" if (found := ratios(key, "dense")) else ""
            lines.append(
                f"- **A round beside TensorFlow's parameter server, with {server}:** sparse gradients "
                f"{between(sparse)}{dense}."
            )
    steps = results.get("steps", {})
    found = [
        f"{times(steps[label]['ratios']['loop'])} {where}"
        for label, where in (("as embedded", "with the defaults"), ("in memory", "without disk"))
        if "loop" in steps.get(label, {}).get("ratios", {})
    ]
    if found:
        lines.append(f"- **A training step of a whole model beside TensorFlow:** {', '.join(found)}.")
    others = results.get("others", {}).get("rows", {})
    if gloo := [1 / value for value in ratios("gloo", "dense", others)]:
        lines.append(
            f"- **A round beside torch's all_reduce over gloo:** dense gradients {between(gloo)}; it needs no server."
        )
    bars = [(name, *one) for name, row in rows.items() for one in _bars(row, name)]
    if bars:
        counts = [
            f"{sum(ratio >= bar for _, key, ratio, bar in bars if key == wanted)} of "
            f"{sum(key == wanted for _, key, _, _ in bars)} bars are reached {where}"
            for wanted, where in (("redisacc", "with the defaults"), ("redisacc-memory", "without disk"))
            if any(key == wanted for _, key, _, _ in bars)
        ]
        lines.append(f"- **Targets:** {', '.join(counts)}. The tables mark those that are missed.")
    return "\n".join([lines[0], "", *lines[1:], "", picture(drawn, "Conclusion")])


def _six_rows(section: Results, drawn: dict[str, str]) -> str:
    rows, seconds, ratios, costs = section["rows"], [], [], []
    order = ("redisacc", "redisacc-memory", "redisacc-durable", "bare")
    for name, row in rows.items():
        peers = row["peers"]
        seconds.append([name, *(ms(peers[k]["seconds"]) if k in peers else "" for k in ("tensorflow", *order))])
        cells = [name]
        reached = {key: (ratio >= bar, bar) for key, ratio, bar in _bars(row, name)}
        for key in order:
            cells.append(times(row["ratios"][key]) if "tensorflow" in peers and key in peers else "")
            if key in ("redisacc", "redisacc-memory"):
                is_reached, bar = reached.get(key, (True, 0.0))
                cells.append("" if not bar else f"{bar:g}x" if is_reached else f"**{bar:g}x, missed**")
        cells.append(f"{row['goal']:g}x" if "goal" in row else "bare sockets")
        ratios.append(cells)
        for key, peer in peers.items():
            cpu = peer["cpu_seconds_a_round"]
            costs.append(
                [
                    name,
                    plots.NAMES[key],
                    short(peer["apply_seconds"]["median"] * 1e3),
                    short(peer["tail_seconds"]["median"] * 1e3),
                    *(short(cpu[who] * 1e3) for who in ("workers", "taker", "server")),
                ]
            )
    return "\n".join(
        [
            "## A round of four workers, beside TensorFlow's parameter server",
            "",
            "A round has four worker processes, one taker process, and one server on loopback TCP. The taker is "
            "already waiting when all workers get the signal of the step, by one write into a pipe that they share. "
            "The round's time is measured from before that write until the taker has the mean as numpy arrays. No "
            "process reports anything before that, because on two cores a report would delay the others.",
            "",
            "TensorFlow runs one `ps` task and one task for each process over gRPC, with v1 sessions and calls "
            "prepared by `make_callable`. Every choice favors TensorFlow: gradients are variables on the worker's own "
            "device, so no `feed_dict` is paid for, and local steps are constants beside the accumulator. redisacc "
            "gets numpy arrays by `apply_grad`. It runs on a server that writes nothing to disk, as TensorFlow does, "
            "and then on the embedded server: with its default settings, which save a snapshot a minute after a "
            "change, and with `durable`, which writes an append-only file. Each runs in alternation with rounds of "
            "TensorFlow, whose column shows the first of the comparisons.",
            "",
            "*Bare sockets* move the same bytes through a server and add them up, without steps, checks, counts or "
            "guarantees; nothing that adds through a Redis server can be faster. A ratio says how many times as long "
            "TensorFlow takes. *Bar* is the least ratio that the project sets itself for this row and the server on "
            "its left, *goal* the ratio that it aims for with nothing on disk.",
            "",
            table(["ms a round", "TensorFlow, gRPC", *(plots.NAMES[key] for key in order)], seconds),
            table(
                [
                    "ratio",
                    plots.NAMES["redisacc"],
                    "bar",
                    plots.NAMES["redisacc-memory"],
                    "bar",
                    plots.NAMES["redisacc-durable"],
                    plots.NAMES["bare"],
                    "goal",
                ],
                ratios,
            ),
            _bfloat16(rows),
            picture(drawn, "Six rows"),
            "The cost of a round: the median time of one worker's call; the time from the end of the last worker's "
            "call until the taker has the result (negative if the taker was done before that worker had its reply); "
            "and the CPU time of all workers, of the taker, and of the server. The server's is measured in steps of "
            "10 ms over all rounds.",
            "",
            table(
                ["", "ms", "apply", "from the last apply to the result", "workers' CPU", "taker's CPU", "server's CPU"],
                costs,
            ),
            versions(section),
        ]
    )


def _bfloat16(rows: Results) -> str:
    """Returns the table of the dense rows with bfloat16 on the wire, or nothing if they were not measured."""
    lines = []
    for name, row in rows.items():
        cells, bars = [name], row.get("bfloat16_bars", {})
        for key in ("redisacc-memory", "redisacc"):
            encoded = f"{key}-bfloat16"
            if encoded in row["peers"]:
                cells.append(ms(row["peers"][encoded]["seconds"]))
                cells.append(times(row["ratios"][encoded]) if "tensorflow" in row["peers"] else "")
                cells.append(f"{bars[key]:g}x" if key in bars else "")
            else:
                cells += ["", "", ""]
        if any(cells[1:]):
            lines.append(cells)
    if not lines:
        return ""
    return "\n".join(
        [
            'With `encoding="bfloat16"`, gradients travel as half as many bytes, and TensorFlow\'s as they are:',
            "",
            table(
                ["ms a round", "nothing on disk", "ratio", "bar", "as embedded", "ratio", "bar"],
                lines,
            ),
        ]
    )


def _others(section: Results, drawn: dict[str, str]) -> str:
    keys = list(dict.fromkeys(key for row in section["rows"].values() for key in row["peers"]))
    rows = [
        [name, *(ms(row["peers"][key]["seconds"]) if key in row["peers"] else "" for key in keys)]
        for name, row in section["rows"].items()
    ]
    ratios = [
        [name, *(times(inverse(row["ratios"][key])) if key in row["ratios"] else "" for key in keys[1:])]
        for name, row in section["rows"].items()
    ]
    return "\n".join(
        [
            "## Alternatives",
            "",
            "The same arrays and the same timing, with nothing on disk. None of the alternatives does what redisacc "
            "does. TensorFlow in one process has no network between worker and accumulator, and its state ends with "
            "the process. `all_reduce` needs every rank in every round, has no step, gives every rank the result, and "
            "returns only the sum of sparse tensors. Code written by hand counts a gradient twice, or never, if a "
            "connection breaks. The hash of floats is left out where it would take many seconds.",
            "",
            table(["ms a round", *(plots.NAMES[key] for key in keys)], rows),
            "How many times as long the alternative takes:",
            "",
            table(["", *(plots.NAMES[key] for key in keys[1:])], ratios),
            picture(drawn, "Alternatives"),
            versions(section),
        ]
    )


def _limits(section: Results, drawn: dict[str, str]) -> str:
    parts = [
        "## Limits",
        "",
        "One process and one server. The bare socket sends the array's own memory and receives into an array, and does "
        "nothing else. For large gradients, a dense gradient is applied, and taken in a round of its own; SET and GET "
        "move the same bytes, as one string and in pieces of 2 MiB. For small gradients, an apply of 10 rows of 16 "
        "floats is compared with EVALSHA of a script that does nothing, of the same script with the gradient's bytes "
        "as arguments, and of an addition without checks, counts or guarantees.",
        "",
        picture(drawn, "Limits"),
    ]
    wanted = section["wanted"]
    for label, sizes in section["servers"].items():
        rows = []
        for size, result in sizes.items():
            for name, seconds in result["seconds"].items():
                rate = f"{result['bytes'] / seconds['median'] / 1e9:.2f}" if "bytes" in result else ""
                us = [short(seconds[which] * 1e6) for which in ("median", "q1", "q3")]
                rows.append([size, name, f"{us[0]} ({us[1]} to {us[2]})", rate])
        parts += [f"### Server: {label}", "", table(["", "", "µs", "GB/s"], rows)]
        ratios = []
        for size, result in sizes.items():
            for name, ratio in result["ratios"].items():
                # Stored as a share of the bare socket's speed; for EVALSHA, as a multiple of its time.
                share, least = (inverse(ratio), 1 / wanted[name]) if name == "EVALSHA" else (ratio, wanted[name])
                what = {
                    "SET": "apply, share of the bare SET's speed",
                    "GET": "take, share of the bare GET's speed",
                    "EVALSHA": "apply, share of the bare EVALSHA's speed",
                }[name]
                ratios.append([size, what, times(share), f"at least {short(least)}x"])
        parts.append(table(["", "", "measured", "wanted (4 MB, 10x16)"], ratios))
    return "\n".join(parts)


def _bound(section: Results, drawn: dict[str, str]) -> str:
    parts = [
        "## In place or buffered",
        "",
        "One client adds to rows that exist already. `script` is the server's own figure for the script: mean and 99th "
        f"percentile. A script may hold the server for {section['allowed_us']} µs.",
        "",
        picture(drawn, "In place or buffered"),
    ]
    for name, curve in section["curves"].items():
        rows = []
        for point in curve:
            cells: list[object] = [point["elements"]]
            for way in ("in place", "buffered"):
                found = point[way]
                cells += [
                    short(found["seconds"]["median"] * 1e6),
                    short(found["script_us"]),
                    "" if found["script_p99_us"] is None else short(found["script_p99_us"]),
                ]
            rows.append(cells)
        parts.append(
            table(
                [f"µs: {name}; elements", "in place", "script", "99 %", "buffered", "script", "99 %"],
                rows,
            )
        )
    if "rounds" in section:
        parts += [
            "Whole rounds of dense gradients, until the taker has the mean:",
            "",
            table(
                ["ms a round", "workers", "in place", "buffered", "in place takes, times as long"],
                [
                    [
                        name,
                        workers,
                        *(ms(row["peers"][way]["seconds"]) for way in ("in place", "buffered")),
                        times(row["ratios"]["buffered"]),
                    ]
                    for workers, rows in section["rounds"].items()
                    for name, row in rows.items()
                ],
            ),
        ]
    return "\n".join(parts)


def _cluster(section: Results, drawn: dict[str, str]) -> str:  # noqa: ARG001
    rows = []
    for name, operations in section["rows"].items():
        for operation, found in operations.items():
            seconds, ratios = found["seconds"], found["ratios"]
            rows.append(
                [
                    f"{name}, {operation}",
                    ms(seconds["standalone"]),
                    ms(seconds["cluster"]),
                    times(inverse(ratios["cluster"])),
                    times(inverse(ratios["again"])),
                ]
            )
    return "\n".join(
        [
            "## Redis Cluster",
            "",
            f"One process applies a gradient and takes it, on a standalone server and on a cluster of "
            f"{section['masters']} masters in turn. The ratios are the speed of the cluster, of which at least "
            f"{short(1 / section['allowed'])}x is wanted, and of the standalone server measured twice.",
            "",
            table(["ms", "standalone", "cluster", "ratio", "standalone again"], rows),
        ]
    )


def _growth(section: Results, drawn: dict[str, str]) -> str:
    parts = [
        "## Growth",
        "",
        "Figures for one round, from the server's `INFO`: CPU time of all its threads, memory when every gradient has "
        "arrived and none has been taken, and bytes on the wire. Gradients are summed in place or buffered by the "
        "default rule, unless the title says otherwise. Workers and server share the machine's cores, so more workers "
        "than cores take turns.",
        "",
    ]
    for name, curve in section["curves"].items():
        rows = [
            [
                f"{point['x']:,}",
                ms(point["seconds"]),
                short(point["server_cpu_seconds"] * 1e3),
                short(point["worker_cpu_seconds"] * 1e3),
                short(point["taker_cpu_seconds"] * 1e3),
                short(point["server_memory"] / 1e6),
                short(point["bytes_in"] / 1e6),
                short(point["bytes_out"] / 1e6),
            ]
            for point in curve
        ]
        parts += [
            f"### {name[0].upper()}{name[1:]}",
            "",
            table(
                [
                    "",
                    "ms a round",
                    "server CPU, ms",
                    "workers' CPU, ms",
                    "taker's CPU, ms",
                    "server memory, MB",
                    "in, MB",
                    "out, MB",
                ],
                rows,
            ),
            picture(drawn, name),
        ]
    return "\n".join(parts)


def _steps(section: Results, drawn: dict[str, str]) -> str:
    del drawn
    model = section["model"]
    parts = [
        "## A training step of four workers",
        "",
        f"A model of {model['arrays']} arrays; a gradient of it has {short(model['bytes_of_a_gradient'] / 1e6)} MB. A "
        "step is over when every worker has the new weights: each worker has applied its gradient, and the chief has "
        "taken the mean, subtracted it from the weights and published them. Steps follow one another without a pause, "
        f"and {section['block']} of them are timed together. The chief and the workers are processes of their own. "
        "TensorFlow has a variable and an accumulator for each array on its parameter server, which also updates the "
        "variables, so it moves fewer bytes: the means never leave the server. Of tables, its workers read the rows "
        "that they need, and redisacc's those that have changed. The bare sockets move the bytes that redisacc moves, "
        "without copies, checks or guarantees. Weights were compared with numpy's after every block.",
        "",
    ]
    titles = {
        "in memory": "Nothing on disk",
        "as embedded": "The embedded server with its defaults",
        "durable": "The embedded server with an append-only file (`durable`)",
    }
    for label, title in titles.items():
        if label not in section:  # measured before it could be chosen
            continue
        part = section[label]
        rows = []
        for key, peer in part["peers"].items():
            cpu, used = peer["cpu_seconds_a_step"], peer["server_a_step"]
            rows.append(
                [
                    peer["name"],
                    ms(peer["seconds"]),
                    times(part["ratios"][key]) if key in part["ratios"] and "tensorflow" in part["peers"] else "",
                    *(short(cpu[name] * 1e3) for name in ("workers", "chief", "server")),
                    *(short(used[name] / 1e6) if used else "" for name in ("bytes_in", "bytes_out")),
                ]
            )
        ours = [figure(part["ratios"][key]) for key in ("direct", "loop", "updates") if key in part["ratios"]]
        wanted = [
            f"{name} {part[name]:g}x" + (", **missed**" if name == "bar" and ours and min(ours) < part[name] else "")
            for name in ("bar", "goal")
            if name in part
        ]
        parts += [
            f"### {title}",
            "",
            *([f"TensorFlow's time divided by redisacc's: {', '.join(wanted)}.", ""] if wanted else []),
            table(
                [
                    "",
                    "step, ms",
                    "ratio",
                    "CPU of the workers, ms",
                    "of the chief",
                    "of the server",
                    "in, MB",
                    "out, MB",
                ],
                rows,
            ),
        ]
    small = section["small"]
    parts += [
        "### Number of arrays",
        "",
        "The same bytes in more and more arrays, with TreeAccumulator and Parameters and nothing on disk.",
        "",
        table(
            ["arrays", "step, ms", "speed, compared with one array"],
            [
                [f"{point['arrays']:,}", ms(point["seconds"]), f"{1 / point['ratio']:.2f}x"]
                for point in section["growth"]
            ],
        ),
        f"Applying a tree of {small['arrays']} small arrays, {short(small['bytes'] / 1e3)} kB in total, takes "
        f"{short(small['seconds']['tree']['median'] * 1e6)} µs, and one dense array of as many bytes "
        f"{short(small['seconds']['array']['median'] * 1e6)} µs: {times(inverse(small['ratio']))} its speed "
        f"(bar: at least {short(1 / small['bar'])}x).",
        "",
    ]
    return "\n".join(parts)


def _reduction(section: Results, drawn: dict[str, str]) -> str:
    rows = [
        [
            name,
            f"{case['gradients']:,}",
            short(case["gradients"] * case["bytes_of_a_gradient"] / 1e6),
            ms(case["take_seconds"]),
            short(case["numpy_seconds"]["median"] * 1e3),
            "?" if case["peak_memory"] is None else short(case["peak_memory"] / 1e6),
            short(case["bytes_of_the_result"] / 1e6),
            "?"
            if case["peak_memory"] is None
            else short((case["peak_memory"] - 2.5 * case["bytes_of_the_result"]) / 1e6),
        ]
        for name, case in section["cases"].items()
    ]
    return "\n".join(
        [
            "## Reduction of buffered gradients",
            "",
            "All gradients are buffered before the take begins, so nothing can be fetched during the wait. The peak is "
            "the taker's resident memory beyond what it used before the call; the part of it beyond 2.5 times the "
            "result should be bounded, however many gradients there are. For comparison, the table has numpy's time "
            "for the same sums of arrays that are in memory already.",
            "",
            table(
                [
                    "",
                    "gradients",
                    "all of them, MB",
                    "take, ms",
                    "numpy, ms",
                    "taker's peak, MB",
                    "result, MB",
                    "beyond 2.5 results, MB",
                ],
                rows,
            ),
            picture(drawn, "Reduction"),
        ]
    )


def _longest(section: Results, drawn: dict[str, str]) -> str:
    del drawn
    sizes = section["sizes"]
    parts = [
        "## Longest calls on large keys",
        "",
        f"One accumulator with {sizes['sessions']:,} sessions, of which half may be forgotten; {sizes['rows']:,} rows; "
        f"{sizes['buffered']:,} gradients inline and as many in parts; {sizes['takers']:,} takers in the queue, first "
        f"live and then dead ones; {sizes['rounds']:,} unacknowledged rounds; {sizes['workers']:,} workers with names "
        "of 200 letters. The last column names the operation of the longest call. Names in capitals are commands that "
        "clients send or that scripts call, if one took more than 250 µs. Calls below 10 µs are not counted, except "
        "those of the two scripts that touch no data. "
        + (
            "The server had precedence over all other processes."
            if section["real_time"]
            else "The operating system may have suspended the server in the middle of calls, which then look long."
        ),
        "",
    ]
    for label, scripts in section["runs"].items():
        rows = [
            [name, f"{one['calls']:,}", short(one["median"]), f"{one['max']:,.0f}", one["where"]]
            for name, one in scripts.items()
            if not name.isupper() or one["max"] > 250
        ]
        parts += [f"### {label[0].upper()}{label[1:]}", ""]
        parts.append(table(["", "calls", "median, µs", "longest, µs", "during"], rows))
    return "\n".join(parts)


def _scripts(section: list[Results], drawn: dict[str, str]) -> str:
    del drawn
    merged: dict[str, Results] = {}
    for server in section:
        if server["server"] in ("bound", "longest"):
            continue
        for script in server["scripts"]:
            known = merged.setdefault(
                script["name"], {"above_250us": 0, "above_500us": 0, "longest_us": 0, "where": server["server"]}
            )
            known["above_250us"] += script["above_250us"]
            known["above_500us"] += script["above_500us"]
            if script["longest_us"] > known["longest_us"]:
                known |= {"longest_us": script["longest_us"], "where": server["server"]}
    rows = [
        [name, known["above_250us"], known["above_500us"], f"{known['longest_us']:,}", known["where"]]
        for name, known in sorted(merged.items(), key=lambda item: -item[1]["longest_us"])
    ]
    calls = [
        [
            server["server"],
            f"{server['evalsha_calls']:,}",
            "?" if server["evalsha_mean_us"] is None else short(server["evalsha_mean_us"]),
            sum(script["above_500us"] for script in server["scripts"]),
            f"{max(script['longest_us'] for script in server['scripts']):,}" if server["scripts"] else "< 200",
        ]
        for server in section
    ]
    return "\n".join(
        [
            "## Longest scripts",
            "",
            "From the slow log of every server of this run except *bound*, where gradients far above the default were "
            "added in place, and *longest*. The server measures wall time: with more busy processes than cores, the "
            "operating system suspends it in the middle of calls, which then look long. *control* shows the size of "
            "this effect: five processes that only call a script that counts to 12,000. A script is named by the first "
            "sentence of its head.",
            "",
            table(["script", "calls > 0.25 ms", "> 0.5 ms", "longest, µs", "server"], rows),
            table(["server", "EVALSHA calls", "mean, µs", "> 0.5 ms", "longest, µs"], calls),
        ]
    )
