"""What the pages of the benchmarks say: what their results give, with a mark wherever a bar is missed."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import against, plots, report
from benchmarks.comparison import report as comparison_report
from benchmarks.comparison.crew import OURS
from benchmarks.comparison.measure import ALONE, changes, last_error, new_lines
from benchmarks.goodput import report as goodput_report
from benchmarks.goodput.measure import seconds_until_back
from benchmarks.markdown import ms, times
from benchmarks.network import report as network_report
from benchmarks.network.update_report import bars, overlaps
from benchmarks.scale import report as scale_report
from benchmarks.stats import inverse, ratio, summary

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MACHINE = {"cpu": "a processor", "cores": 2, "memory_bytes": None, "system": "y", "load_before": 0.5}


def read(name):
    return json.loads((RESULTS / name).read_text())


# Pages in the repository


@pytest.mark.parametrize(
    ("results", "page", "render", "picture"),
    [
        ("results.json", "README.md", lambda found, out: report.render(found, plots.draw(found, out)), "conclusion"),
        (
            *("network.json", "network.md"),
            lambda found, out: network_report.render(found, network_report.draw(found, out)),
            "network-conclusion",
        ),
        (
            *("scale.json", "scale.md"),
            lambda found, out: scale_report.render(found, {scale_report.TITLE: "scale.svg"}),
            None,
        ),
        *((*of.NAMES, lambda found, _, of=of: of.render(found, {}), "") for of in (comparison_report, goodput_report)),
    ],
)
def test_a_page_is_what_its_results_give(monkeypatch, tmp_path, results, page, render, picture):
    monkeypatch.setattr("benchmarks.plots.paint_file", lambda _out, name, *_: f"{name}.svg")
    text = render(read(results), tmp_path)
    assert text == (RESULTS / page).read_text()
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert bool(pictures) == (picture != "")
    assert all((RESULTS / name).is_file() for name in pictures)
    # No table is wider than a page.
    assert max(line.count("|") for line in text.splitlines()) <= 10
    if picture:
        conclusion = text.partition("\n## ")[0]
        assert len(re.findall(r"^- ", conclusion, re.MULTILINE)) <= 5
        assert re.findall(r"!\[.*?\]\((.*?)\)", conclusion) == [f"{picture}.svg"]


def test_rows_that_miss_their_bar_say_so():
    assert "missed** |" in (RESULTS / "network.md").read_text()
    row = r"^\| dense-4MB \| \S+ \([^|]+\|[^|]+\| (\S+)x \([^|]+\| (.+?) \|"
    ((found, said),) = re.findall(row, (RESULTS / "README.md").read_text(), re.MULTILINE)
    assert said == ("1.3x" if float(found) >= 1.3 else "**1.3x, missed**")


def test_the_manual_quotes_the_results():
    text = (ROOT / "docs" / "explanations" / "benchmarks.md").read_text()
    rows = re.findall(
        r"^\| ([\d,]+ MB), (\d+) Gbit/s \| (.*?) \|$",
        text.partition("## Large groups of hosts")[2].partition("\n## ")[0],
        re.MULTILINE,
    )
    assert len(rows) == 4
    for model, gigabits, cells in rows:
        runs = [
            run
            for run in read("scale.json")["runs"]["grown"]
            if (run["model"], run["gigabits"]) == (model, int(gigabits))
        ]
        # Last is the wire, rounded.
        assert [scale_report.milliseconds(run["seconds"]) for run in runs] == cells.split(" | ")[:-1]
    text = (ROOT / "docs" / "explanations" / "comparison.md").read_text()
    assert "```diff\n" + "\n".join(changes(OURS)) + "\n```" in text
    rows = (RESULTS / comparison_report.NAMES[1]).read_text()
    for title in (comparison_report.TITLES[OURS], comparison_report.TITLES["ddp"]):
        # The digits come first, and then a GPT.
        cells, _ = re.findall(rf"\| {title} (\| .*? \| .*? \| .*? \|)", rows)
        assert f"| {title} {cells}" in text


# Numbers


def test_ratios_and_quartiles():
    assert ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]) == {"of_medians": 2.0, "median": 2.0, "q1": 2.0, "q3": 2.0}
    found = ratio([1.0, 8.0, 9.0], [1.0, 2.0, 9.0])
    assert found == {"of_medians": 4.0, "median": 1.0, "q1": 1.0, "q3": 2.5}
    assert inverse(found) == {"of_medians": 0.25, "median": 1.0, "q1": 0.4, "q3": 1.0}
    assert summary([3.0, 1.0, 2.0]) == {"n": 3, "median": 2.0, "q1": 1.5, "q3": 2.5, "min": 1.0, "max": 3.0}
    assert times({"median": 2.0, "of_medians": 9.0, "q1": 1.0, "q3": 3.0}) == "2x (1 to 3)"
    # Results of older runs have no median of ratios, so the quartiles may be those of another figure.
    assert times({"of_medians": 0.13, "q1": 0.124, "q3": 0.139}) == "0.13x (0.124 to 0.139)"
    assert times({"of_medians": 0.11, "q1": 0.124, "q3": 0.139}) == "0.11x"
    for write in (ms, times):
        with pytest.raises(ValueError, match=r"the median 0.11 lies outside its quartiles, 0.124 to 0.139"):
            write({"median": 0.11, "of_medians": 0.13, "q1": 0.124, "q3": 0.139})


# The comparison with an earlier commit


def test_a_ratio_is_the_time_now_divided_by_the_time_then():
    then = {"seconds": {"median": 0.002}, "totals_a_round": {"scripts": 6, "script_us": 240}}
    now = {"seconds": {"median": 0.001}, "totals_a_round": {"scripts": 4, "script_us": 200}}
    found = against.table("abc", [against.line("a row", then, now)])
    assert found.splitlines()[-1] == "| a row | 2.00 | 1.00 | 0.50 | 6.0, 4.0 | 40.0, 50.0 | 1.25 |"


# The comparison with DDP and Horovod. Its programs run in tests/examples.


def test_the_comparison_counts_lines_and_says_what_a_kill_does():
    for name in (OURS, comparison_report.GPT + OURS):
        assert new_lines(name) <= comparison_report.BAR
    assert len([line for line in changes("ddp") if line.startswith("+")]) == new_lines("ddp")
    assert new_lines(ALONE) == 0
    results = read(comparison_report.NAMES[0])
    assert "wanted**" not in comparison_report.render(results, {})
    ours = results["programs"][OURS]
    ours["lines"], ours["kill"]["weights"] = 5, ["b"]
    page = comparison_report.render(results, {})
    assert "| redisacc | **5, at most 4 wanted** |" in page
    assert "**the processes end with other weights than without a kill: b.**" in page
    ours["kill"]["weights"] = []
    assert "**the training did not come to its end.**" in comparison_report.render(results, {})
    text = "ValueError: no\n[rank0]: RuntimeError: [/a/pair.cc:5] Read error [127.0.0.1]:80: Reset by peer. Look.\nend"
    assert last_error(text) == "Read error: Reset by peer"
    assert last_error("") == "no message"


# Goodput


def test_the_page_of_goodput_marks_bits_that_differ():
    results = read(goodput_report.NAMES[0])
    results["crews"][0]["different"] = 3
    assert "**3 of them differed**" in goodput_report.render(results, {})


def test_a_worker_is_back_with_the_first_step_of_another_process():
    killed = [[1, 0, 10.0, 77], [2, 0, 11.0, 77], [2, 0, 13.5, 78], [3, 0, 13.9, 78]]
    another = [[1, 0, 10.0, 79], [2, 0, 11.1, 79], [3, 0, 13.8, 79]]
    assert seconds_until_back([another, killed], 12.0) == 1.5
    assert seconds_until_back([another, killed], 13.6) is None


# Between hosts


def test_the_page_says_how_much_of_an_upload_a_backward_pass_hides():
    medians = {"no-pass": 0.2, "after": 0.3, "streamed": 0.24}
    peers = {
        key: {"name": key, "seconds": {"median": value, "q1": value, "q3": value}} for key, value in medians.items()
    }
    section = {"peers": peers, "backward_seconds": 0.1}
    network = {"gigabits": 1, "workers": 2, "overlap": {"overlap-31MB": section}}
    assert [line.split(" | ")[-2:] for line in overlaps([network]).splitlines()[-3:]] == [
        *(["1.00", " |"], ["1.50", " |"], ["1.20", "**1.15, missed** |"])
    ]
    assert bars([network]) == [False]
    peers["streamed"]["seconds"]["median"] = 0.23
    assert bars([network]) == [True]
