"""The page in a real Chromium: its values, a stopped worker, hostile names, a server that goes away."""

import os
import time

import numpy as np
import pytest
from browser import NoBrowserError, chromium
from support.training_options import grouped

import redisacc

# `make dashboard` runs them: they need a browser.
pytestmark = [pytest.mark.servers("valkey"), pytest.mark.thorough]

EVIL = '<img src=x onerror="document.title=1"><script>document.title=2</script>&amp;"\''


@pytest.fixture(scope="module")
def browser():
    try:
        with chromium() as found:
            yield found
    except NoBrowserError as error:
        # `make test-rest` may run where nothing drives a browser; `make dashboard` is the step of CI for this.
        if os.environ.get("CI", "").lower() in ("true", "1") and "playwright" not in str(error):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture
def open_page(browser):
    """Opens a page, 1,280 pixels wide unless something else is said. It must not log errors, nor break its policy."""
    pages, wrong = [], []

    def opened(url, **options):
        page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if "Content Security" in message.text else None)
        page.goto(url)
        pages.append(page)
        return page

    yield opened
    for page in pages:
        page.close()
    assert wrong == []


def shows(page, selector, text):
    page.wait_for_function(
        "([selector, text]) => document.querySelector(selector)?.textContent.includes(text)", arg=[selector, text]
    )


def row_of(page, name):
    """Returns the cells of an accumulator in the list."""
    row = page.locator("#rows tr", has=page.get_by_role("button", name=name, exact=True))
    return row.locator("td").all_inner_texts()


def test_values_are_those_of_info_and_a_stopped_worker_shows_up(
    dashboard, open_page, open_dense, open_parameters, background, until
):
    ann, bob = (open_dense("float32", [1000], "w", worker=name, staleness=1) for name in ("ann", "bob"))
    parameters = open_parameters("w")
    page = open_page(dashboard().url)
    shows(page, "#name", "w")
    for step in range(3):
        take = background(ann.take_grad, 2, timeout=60)
        until(lambda: ann.info().waiting)
        ann.apply_grad([1.0] * 1000, step)
        bob.apply_grad([1.0] * 1000, step)
        take.result()
        parameters.publish([1.0], step + 1)
    take = background(ann.take_grad, 2, timeout=60)
    ann.apply_grad([1.0] * 1000, 2)
    shows(page, "#workers", "late")
    info = ann.info()
    assert [worker.name for worker in info.late] == ["bob"]
    name, step, filled, late, *_ = row_of(page, "w")
    assert (name, step, filled, late) == ("w", str(info.global_step), f"{info.num_accumulated} of 2", "1")
    assert page.locator("#filling-count").inner_text() == "1 of 2 gradients"
    assert page.locator("#filling-for").inner_text() == "for ann"
    assert "1 by 1 step late" in page.locator("#notes").inner_text()
    workers = [line.split("\t") for line in page.locator("#workers").inner_text().splitlines()]
    assert [(cells[0], cells[3], cells[6], cells[7]) for cells in workers] == [
        ("bob", "late", "0", "3"),
        ("ann", "in the round", "1", "4"),
    ]
    assert page.locator("#rounds tr").count() == info.takes == 3
    bar = page.locator("#rounds tr").first.locator("svg")
    assert "first to last gradient" in bar.get_attribute("aria-label")
    assert "take to publish" in bar.get_attribute("aria-label")
    assert {part.get_attribute("class") for part in bar.locator("rect").all()} >= {"p0", "p3"}
    # The age of the late worker grows by itself.
    age = workers[0][4]
    page.wait_for_function("before => !document.querySelector('#workers').innerText.includes(before)", arg=age)
    bob.apply_grad([1.0] * 1000, 3)
    take.result()
    shows(page, "#rounds", "3")


@pytest.mark.parametrize("width", [1280, 390])
def test_a_training_shows_its_progress_and_curves(dashboard, open_page, real_client, width):
    options = {"optimizer": redisacc.optim.SGD(0.1), "workers": 1, "number": 0, "redis": real_client}
    with redisacc.Training("t", {"w": np.zeros(1000, np.float32)}, **grouped(options)) as training:
        for step, weights in training.steps(until=40):
            if step == 30:
                page = open_page(dashboard().url, viewport={"width": width, "height": 900})
                shows(page, "#training-step", "Step 30")
                shows(page, "#training-of", "of 40, 75 %")
                shows(page, "#training-facts", f":{os.getpid()}")
                shows(page, "#training-facts", "3.91 KiB")
                shows(page, "#curves", "loss")
                names = page.locator("#curves figcaption span").all_inner_texts()
                assert names == ["loss", "acc", "time of a step"]
                loss = page.locator("#curves figure", has_text="loss")
                assert loss.locator("b").inner_text() == "1.242"
                assert len(loss.locator("polyline").get_attribute("points").split()) == 30
                assert loss.locator(".scale span").all_inner_texts() == ["30", "1.242"]
                # NaN has no point.
                assert page.locator("#curves figure", has_text="acc").locator("polyline").count() == 0
                box = loss.locator("svg").bounding_box()
                page.mouse.move(box["x"] + 1, box["y"] + box["height"] / 2)
                assert loss.locator("b").inner_text() == "30 in step 0"
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
                page.mouse.move(0, 0)
                before = loss.locator("polyline").get_attribute("points")
                page.get_by_label("log scale").check()
                in_logs = loss.locator("polyline").get_attribute("points")
                page.get_by_label("smooth").check()
                assert len({before, in_logs, loss.locator("polyline").get_attribute("points")}) == 3
            training.apply(weights, metrics={"loss": 30 * 0.896**step, "acc": float("nan")})
        shows(page, "#training-of", "finished")
        training.delete()


def test_hostile_names_stay_text(dashboard, open_page, open_dense):
    acc = open_dense("float32", [1], EVIL, worker=EVIL)
    acc.apply_grad([1.0])
    page = open_page(dashboard().url)
    shows(page, "#name", EVIL)
    shows(page, "#workers", EVIL)
    assert page.locator("#rows button").inner_text() == EVIL
    assert page.locator("main img, main script").count() == 0
    assert page.title().startswith("redisacc: ")


def test_the_page_outlives_a_restart_of_the_server_and_of_the_dashboard(dashboard, open_page, daemon, until):
    server = daemon("--appendonly", "yes").start()
    served = dashboard(url=server.url)
    with redisacc.ConditionalAccumulator("float32", [1], "w", redis=server.url) as acc:
        acc.apply_grad([1.0])
        page = open_page(served.url)
        shows(page, "#filling-count", "1 gradient")
        server.stop()
        page.wait_for_selector("#link[data-state='no answer']")
        shows(page, "#problem", "no Redis server answers")
        server.start()
        page.wait_for_selector("#link[data-state='live']")
        assert page.locator("#problem").is_hidden()
        acc.apply_grad([1.0])
        shows(page, "#filling-count", "2 gradients")
        served.stop()
        page.wait_for_selector("#link[data-state='reconnecting']")
        dashboard("--port", str(served.port), url=server.url)
        page.wait_for_selector("#link[data-state='live']")
        acc.apply_grad([1.0])
        shows(page, "#filling-count", "3 gradients")
        acc.delete()
        shows(page, "#none", "There are no accumulators yet")
        assert page.locator("#detail").is_hidden()


def test_with_a_token_the_page_asks_for_it(dashboard, open_page, open_dense):
    """The browser sends the token with everything, also with the request for updates."""
    open_dense("float32", [1], "w")
    credentials = {"username": "anybody", "password": "correct-horse-battery"}
    page = open_page(dashboard(token="correct-horse-battery").url, http_credentials=credentials)
    shows(page, "#rows", "w")


# Returns what of the figures at the top is cut off, and by how many pixels their last row misses the right edge.
FIGURES = """() => {
  const box = document.querySelector(".figures").getBoundingClientRect();
  const last = document.querySelector(".figures > div:last-child").getBoundingClientRect();
  const all = [...document.querySelectorAll(".figures > div, .figures dt")];
  const cut = all.filter((it) => it.scrollWidth > it.clientWidth);
  return [cut.map((it) => it.textContent), Math.round(box.right - last.right) - 1];
}"""


@pytest.mark.parametrize("width", [1440, 1280, 1240, 1024, 700, 390])
def test_the_figures_at_the_top_fill_their_rows_at_every_width(dashboard, open_page, open_dense, width):
    open_dense("float32", [1], "w")
    page = open_page(dashboard().url, viewport={"width": width, "height": 844})
    shows(page, "#rows", "w")
    shows(page, "#memory", "Memory of ")
    assert page.evaluate(FIGURES) == [[], 0]


def test_by_keyboard_on_a_phone_and_in_both_themes(dashboard, open_page, open_dense):
    accs = [open_dense("float32", [1], name) for name in ("first", "second", "third")]
    page = open_page(dashboard().url, viewport={"width": 390, "height": 844}, color_scheme="dark")
    shows(page, "#rows", "third")
    # Nothing is wider than the screen, and on a phone the list comes first.
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator("#detail").is_hidden()
    page.locator("#rows button").nth(1).focus()
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.activeElement.id === 'name'")
    assert page.locator("#name").inner_text() == "second"
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.get_by_role("button", name="All of them").press("Enter")
    assert page.evaluate("document.activeElement.textContent") == "second"

    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    theme = page.locator("#theme")
    theme.press("Enter")
    assert theme.inner_text() == "Theme: light"
    assert page.evaluate(background) != dark
    page.reload()
    assert theme.inner_text() == "Theme: light"
    theme.press("Enter")
    assert page.evaluate(background) == dark

    page.get_by_label("Filter by name").fill("SEC")
    shows(page, "#matching", "1 of 3")
    assert page.locator("#rows tr").count() == 1
    for acc in accs:
        acc.delete()


def test_a_thousand_accumulators_and_a_thousand_workers(dashboard, open_page, open_dense, client):
    acc = open_dense("float32", [1], "a-0000")
    acc.apply_grad([1.0])
    record = client.hgetall("redisacc:{a-0000}")
    now = int(time.time() * 1000)
    pipeline = client.pipeline(transaction=False)
    names = [f"a-{n:04}" for n in range(1, 1000)]
    for name in names:
        pipeline.hset(f"redisacc:{{{name}}}", mapping={**record, "num_accumulated": 0, "round_shape": ""})
        pipeline.sadd("redisacc:names", name)
    sessions = {f"{now}-{n:x}": f"1 applied 0 1 {now - 5000} 1 0 worker-{n:04}" for n in range(1000)}
    pipeline.hset("redisacc:{a-0000}:sessions", mapping=sessions)
    pipeline.execute()
    try:
        page = open_page(dashboard().url)
        shows(page, "#matching", "1,000")
        # Expected, or late if this machine is slow.
        shows(page, "#states", "1,000 ")
        assert page.locator("#rows tr").count() == page.locator("#workers tr").count() == 100
        page.locator("#more-workers").click()
        page.wait_for_function("() => document.querySelectorAll('#workers tr').length === 1000")
        for shown in (400, 700, 1000):
            page.locator("#more").click()
            page.wait_for_function("shown => document.querySelectorAll('#rows tr').length === shown", arg=shown)
        # The page goes on answering while updates arrive.
        acc.apply_grad([1.0])
        shows(page, "#filling-count", "2 gradients")
        page.locator("#rows button").nth(500).click()
        shows(page, "#name", "a-0500")
    finally:
        client.delete(*(f"redisacc:{{{name}}}" for name in names))
        client.srem("redisacc:names", *names)
        client.hdel("redisacc:{a-0000}:sessions", *sessions)
        acc.delete()
