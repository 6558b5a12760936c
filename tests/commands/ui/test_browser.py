"""The page in a real browser, beside a run that is going on."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dapo.observe.changes import Change
from dapo.observe.metrics import MetricsLog
from dapo.observe.samples import write_samples
from dapo.observe.spans import write_spans
from dapo.util.files import lock_file
from dapo.util.spans import Span
from episodes import chat_tokenizer
from page_run import RIGHT, SCRIPT, episode_group, made_group, page_run, served, step_metrics
from run_cases import Recorder, run

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
pytest.importorskip("duckdb")
pytest.importorskip("uvicorn")

CHROMIUM = shutil.which("chromium")
WAIT = 60_000
"""Milliseconds that whatever is waited for may take: on a busy machine some of it takes long, and nothing fails."""
sync_api.expect.set_options(timeout=WAIT)  # its own would be five seconds
SHOTS = os.environ.get("DAPO_SHOTS")
"""A folder that the pictures are kept in; by default they are only taken."""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="the page was not tested: needs Debian's package chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # containers have none
        yield found
        found.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A tab that fails the test if a script of the page does."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    found, problems = context.new_page(), []
    found.set_default_timeout(WAIT)
    found.on("pageerror", lambda error: problems.append(str(error)))
    found.on("console", lambda m: problems.append(m.text) if m.type == "error" and "net::" not in m.text else None)
    yield found
    context.close()
    assert problems == []


def ready(page: Any, view: str) -> None:
    page.wait_for_selector(f'#view[data-ready="{view}"]')
    assert page.locator(".problem").count() == 0


def test_curves_move_while_a_run_trains(page: Any, tmp_path: Path) -> None:
    go_on = threading.Semaphore(2)

    def after(step: int) -> None:
        go_on.acquire(timeout=WAIT / 1000)  # two steps at once, the others when the page has been looked at

    settings = {"training.steps": 4}
    training = threading.Thread(target=run, args=(tmp_path / "runs" / "live", settings, Recorder(after)))
    with served(tmp_path / "runs") as address:
        training.start()
        try:
            page.goto(address)
            page.wait_for_selector("#live.on")
            line = page.locator('[data-chart="accuracy"] path.line')
            line.wait_for(state="attached")  # a level one has no height, and would not count as visible
            before = line.get_attribute("d")
            sync_api.expect(page.locator(".run.running")).to_have_count(1)
            sync_api.expect(page.locator("#live")).to_have_text("live")
            go_on.release(8)
            sync_api.expect(line).not_to_have_attribute("d", before)
            page.wait_for_selector(".run.finished")
            sync_api.expect(page.locator(".tiles")).to_contain_text("4 / 4")  # drawn after the list
            sync_api.expect(page.locator("#live")).to_have_text("connected")
        finally:
            go_on.release(8)
            training.join(60)


def test_groups_are_filtered_and_markup_is_shown_as_text(page: Any, tmp_path: Path) -> None:
    folder = page_run(tmp_path / "r")
    shutil.rmtree(folder.model_before)  # without the tokenizer the text is shown as it was written
    with served(tmp_path) as address:
        page.goto(f"{address}/#groups?run=r")
        ready(page, "groups")
        options = page.locator('.list [role="option"]')
        sync_api.expect(options).to_have_count(6)
        page.locator('select[name="status"]').select_option("kept")
        sync_api.expect(options).to_have_count(2)
        page.locator('input[name="step"]').fill("1")
        page.locator('input[name="step"]').press("Enter")
        sync_api.expect(options).to_have_count(1)
        options.first.click()
        sync_api.expect(page.locator(".detail")).to_contain_text("Step 1, draw 10")  # until then another one is shown
        text = page.locator('[data-sample="0"] .tokens')
        sync_api.expect(text).to_have_text(SCRIPT)  # waits: it may be drawn once more
        assert page.locator("#view script, #view .tokens b").count() == 0
        assert page.title() != "owned" and "status=kept" in page.url
        page.locator('select[name="status"]').select_option("stale")
        page.get_by_text("No group is like this").wait_for()


def test_tokens_are_coloured_by_what_is_asked_for(page: Any, tmp_path: Path) -> None:
    page_run(tmp_path / "r")
    with served(tmp_path) as address:
        page.goto(f"{address}/#groups?run=r&step=1&status=kept")
        ready(page, "groups")
        tokens = page.locator('[data-sample="1"] .tok')
        sync_api.expect(tokens).to_have_text(list("1+2=3"))
        sync_api.expect(tokens.first).to_have_class(re.compile("n4"))  # an advantage of -1 on a scale to -2
        page.get_by_role("radio", name="probability").click()
        sync_api.expect(tokens.first).to_have_class(re.compile("n1"))
        assert page.get_by_role("radio", name="trainer gap").is_disabled()  # was not stored
        page.locator('[data-sample="1"] .tokens').focus()
        page.keyboard.press("ArrowRight")
        sync_api.expect(page.locator(".reading")).to_contain_text("probability 81.9%")  # exp(-0.2)


def test_of_a_large_group_each_sample_is_opened_by_itself(
    page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dapo.commands.ui.samples.MOST_TOKENS", 5)  # a sample has as many, the group more
    page_run(tmp_path / "r")
    with served(tmp_path) as address:
        page.goto(f"{address}/#groups?run=r&step=1&status=kept")
        ready(page, "groups")
        sync_api.expect(page.get_by_role("radio", name="probability")).to_be_disabled()
        assert page.locator(".tok").count() == 0
        page.locator('[data-sample="1"]').get_by_role("button", name="Open all 5 tokens").click()
        sync_api.expect(page.locator('[data-sample="1"] .tok')).to_have_count(5)
        assert page.locator('[data-sample="0"] .tok').count() == 0
        page.get_by_role("radio", name="probability").click()
        sync_api.expect(page.locator('[data-sample="1"] .tok').first).to_have_class(re.compile("n1"))


def test_an_episode_shows_whose_words_are_whose_and_what_each_turn_earned(page: Any, tmp_path: Path) -> None:
    folder = page_run(tmp_path / "r")
    chat_tokenizer().save_pretrained(folder.model_before)
    write_samples(folder.samples, 2, [(episode_group(20), "kept"), (episode_group(21, shorten=True), "kept")])
    with served(tmp_path) as address:
        page.goto(f"{address}/#groups?run=r&step=2&at=2&draw=20")
        ready(page, "groups")
        works, fails = (page.locator(f'[data-sample="{index}"]') for index in (0, 1))
        heads = ["calls a tool · reward 0.250", "cut, not in the loss", "its call cannot be read"]
        told = [f"turn {number} · {head}" for number, head in enumerate(heads, 1)]
        sync_api.expect(fails.locator(".turn")).to_have_text([*told, "turn 4"])
        sync_api.expect(works.locator(".theirs").first).to_contain_text("There is a calculator.")
        sync_api.expect(works.locator("header")).to_contain_text("2 turns, ended")
        assert re.search("p4", works.locator(".tok:not(.theirs)").first.get_attribute("class"))
        cut = fails.locator(".tok").filter(has_text=re.compile("^z$")).first
        assert not re.search("n[1-8]", cut.get_attribute("class"))  # nothing is learned from it
        reply = fails.locator(".tok.theirs").first
        reply.get_by_role("button").click()  # it was folded
        sync_api.expect(reply).to_contain_text("Error: division by zero " * 60)
        works.locator(".tokens").focus()
        page.keyboard.press("ArrowRight")
        sync_api.expect(page.locator(".reading")).to_contain_text("probability")
        reply.dispatch_event("pointerover")
        sync_api.expect(page.locator(".reading")).to_contain_text("of the environment")
        page.screenshot(path=f"{SHOTS}/episodes.png" if SHOTS else None)
        page.locator('.list [role="option"]').nth(1).click()
        sync_api.expect(fails.locator(".tokens")).to_have_count(4)  # one for each sequence
        sync_api.expect(fails.locator(".turn").last).to_have_text("turn 4")


def test_a_second_run_keeps_how_curves_are_drawn_and_views_of_one_say_whose_they_are(page: Any, tmp_path: Path) -> None:
    for name in ("one", "two"):
        page_run(tmp_path / name)
    with served(tmp_path) as address:
        page.goto(f"{address}/#overview?run=one&smoothing=0.5&x=tokens")
        ready(page, "overview")
        axis = page.locator('[data-chart="accuracy"] svg text').last
        sync_api.expect(axis).to_have_text(re.compile(" tokens$"))
        page.get_by_label("show two").check()
        page.get_by_text("What it came to").wait_for()
        assert page.get_by_label("smoothing").input_value() == "0.5" and "x=tokens" in page.url
        page.locator("#tab-sampling").click()
        ready(page, "sampling")
        sync_api.expect(page.locator("#view")).to_contain_text("Of one: this view")


def test_the_keyboard_reaches_every_view(page: Any, tmp_path: Path) -> None:
    page_run(tmp_path / "r")
    with served(tmp_path) as address:
        page.goto(address)
        ready(page, "overview")
        page.locator("#tab-overview").focus()
        views = page.locator('[role="tab"]').evaluate_all("tabs => tabs.map(tab => tab.id.slice(4))")
        assert len(views) >= 8
        for view in views[1:]:
            page.keyboard.press("ArrowRight")
            ready(page, view)
            sync_api.expect(page.locator(f"#tab-{view}")).to_be_focused()
        page.keyboard.press("Home")
        ready(page, "overview")
        plot = page.locator('[data-chart="accuracy"] .plot')
        plot.locator("svg").wait_for()  # it is drawn once the page has told it its width
        plot.focus()
        page.keyboard.press("ArrowRight")
        sync_api.expect(page.locator('[data-chart="accuracy"] output')).to_have_text(re.compile(r"step 1\s*10\.0%"))


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)], ids=["desktop", "phone"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_fits_and_has_two_themes(browser: Any, tmp_path: Path, theme: str, width: int, height: int) -> None:
    page_run(tmp_path / "r", steps=4)
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
    page = context.new_page()
    page.set_default_timeout(WAIT)
    back: Callable[[], str] = lambda: page.evaluate("getComputedStyle(document.body).backgroundColor")  # noqa: E731
    with served(tmp_path) as address:
        for view in ("overview", "groups", "sampling", "hacking"):
            page.goto(f"{address}/#{view}?run=r")
            ready(page, view)
            picture = page.screenshot(path=f"{SHOTS}/{view}-{theme}-{width}.png" if SHOTS else None)
            assert picture.startswith(b"\x89PNG")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        first = back()
        page.locator("#theme").click()
        assert back() != first
        page.reload()
        ready(page, "hacking")
        assert back() != first  # it is remembered
    context.close()


def test_what_goes_wrong_is_said(browser: Any, tmp_path: Path) -> None:
    folder, context = page_run(tmp_path / "r", steps=3), browser.new_context(viewport={"width": 320, "height": 640})
    page = context.new_page()
    page.set_default_timeout(WAIT)
    with served(tmp_path) as address:
        page.goto(f"{address}/#alarms?run=r")
        ready(page, "alarms")
        page.get_by_role("heading", name="starvation").wait_for()  # its advice holds a long word
        assert page.evaluate("document.documentElement.scrollWidth") <= 320
        page.goto(f"{address}/#groups?run=r")
        ready(page, "groups")
        page.locator('input[name="step"]').fill("1.5")
        page.locator('input[name="step"]').press("Enter")
        assert page.locator('input[name="step"]:invalid').count() == 1 and "step=1.5" not in page.url
        shutil.rmtree(folder.root)
        page.get_by_text("There is no run r here").wait_for()  # without a click
        page_run(tmp_path / "other")
        page.goto(f"{address}/#groups?run=nosuch")
        page.get_by_text("There is no run nosuch here. Choose one of the list.").wait_for()
        page_run(tmp_path / "hidden" / "nosuch").root.rename(tmp_path / "nosuch")  # whole in one moment
        page.locator('.list [role="option"]').first.wait_for()  # it is there after all
        page.route("**/api/runs", lambda route: route.fulfill(status=401, json={"error": "a token is needed"}))
        page.reload()
        page.get_by_text("a token is needed").wait_for()
    context.close()


def test_signs_that_hide_or_turn_text_around_are_shown(page: Any, tmp_path: Path) -> None:
    folder = page_run(tmp_path / "r")
    shutil.rmtree(folder.model_before)
    write_samples(folder.samples, 3, [(made_group(30, [RIGHT], ["\u202egnp.exe\x1b[31m\ttab"]), "kept")])
    with served(tmp_path) as address:
        page.goto(f"{address}/#groups?run=r&step=3")
        ready(page, "groups")
        sync_api.expect(page.locator(".detail")).to_contain_text("Step 3, draw 30")
        sync_api.expect(page.locator(".tokens")).not_to_be_empty()
        assert page.locator(".tokens").inner_text() == "\\u202egnp.exe\\u001b[31m\ttab"


def test_a_changed_setting_is_a_line_with_its_words(page: Any, tmp_path: Path) -> None:
    folder = page_run(tmp_path / "r", steps=3)
    change = Change(2, "training.learning_rate", 1e-6, 5e-7, "2026-01-02")
    folder.fingerprint.write_text(json.dumps({"changes": [asdict(change)]}))
    with served(tmp_path / "r") as address:
        page.goto(address)
        ready(page, "overview")
        mark = page.locator('[data-chart="accuracy"] g.mark')
        sync_api.expect(mark.locator("title")).to_have_text("step 2: training.learning_rate 1e-06 -> 5e-07")
        chart = page.locator('[data-chart="accuracy"]')
        line, first, last = mark.locator("line"), chart.locator("circle").first, chart.locator("circle").last
        places = [float(one.get_attribute(name) or 0) for one, name in ((first, "cx"), (line, "x1"), (last, "cx"))]
        assert places[1] == pytest.approx((places[0] + places[2]) / 2)  # step 2 of 3
        assert page.evaluate("element => getComputedStyle(element).stroke", line.element_handle()) != "none"


def test_a_chart_is_zoomed_by_pointer_and_keys_has_a_log_scale_and_becomes_files(page: Any, tmp_path: Path) -> None:
    folder = page_run(tmp_path / "r", steps=9)
    with MetricsLog(folder.metrics) as log:
        log.append(10, step_metrics(10) | {"accuracy": 0.0})
    with served(tmp_path) as address:
        page.goto(f"{address}/#overview?run=r")
        ready(page, "overview")
        chart, other = page.locator('[data-chart="accuracy"]'), page.locator('[data-chart="entropy"]')
        sync_api.expect(chart.locator("circle")).to_have_count(10)
        box = chart.locator(".plot").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] - 1, box["y"] + 60)
        page.mouse.up()
        for one in (chart, other):  # they go together
            sync_api.expect(one.locator(".said")).to_have_text(re.compile("^step [56] to 10; double click"))
            sync_api.expect(one.locator("path.line")).to_be_attached()
        assert chart.locator("circle").count() < 7
        tools = chart.locator(".tools")
        tools.locator("summary").focus()
        page.keyboard.press("Enter")
        tools.get_by_label("log scale").press("Space")
        sync_api.expect(chart.locator(".said")).to_contain_text("Log scale: 1 point at or below 0 not drawn")
        with page.expect_download() as download:
            tools.get_by_text("save CSV").click()
        saved = Path(download.value.path()).read_bytes()
        assert saved.startswith(b"curve,step,mean,lowest,highest") and saved.endswith(b"r,9,0.9,0.9,0.9\r\n")
        chart.locator(".plot").focus()
        page.keyboard.press("0")
        sync_api.expect(other.locator(".said")).to_be_empty()
        sync_api.expect(chart.locator("circle")).to_have_count(9)  # the log scale stays
        page.keyboard.press("+")
        sync_api.expect(other.locator(".said")).to_contain_text("step 3 to 7")


def test_texts_are_found_marked_and_lead_to_their_group(
    page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dapo.commands.ui.texts.MOST_FINDS", 2)
    folder = page_run(tmp_path / "r", steps=3)
    shutil.rmtree(folder.model_before)
    with served(tmp_path) as address:
        page.goto(f"{address}/#groups?run=r")
        ready(page, "groups")
        search = page.get_by_label("search texts")
        search.fill("<B>bold")
        search.press("Enter")
        sync_api.expect(page.locator(".finds mark")).to_have_text(["<b>bold"] * 2)
        page.get_by_role("button", name="search on: 2 more steps").click()
        sync_api.expect(page.get_by_text("3 found in the texts of steps 1 to 3.")).to_be_visible()
        page.locator(".finds a").last.click()
        sync_api.expect(page.locator(".detail")).to_contain_text("Step 1, draw 10")
        page.wait_for_function("[...CSS.highlights.get('found')].map(String).join() === '<b>bold'")
        assert page.locator("#view b b, .finds b").count() == 0 and "text=%3CB%3Ebold" in page.url
        search.fill("nowhere")
        search.press("Enter")
        sync_api.expect(page.get_by_text("0 found in the texts of steps 1 to 3.")).to_be_visible()
        with page.expect_download() as download:
            page.get_by_role("button", name="save jsonl").click()
        groups = [json.loads(line) for line in Path(download.value.path()).read_text().splitlines()]
        assert [group["draw"] for group in groups] == [30, 31, 32, 20, 21, 22, 10, 11, 12]


def test_roles_stand_one_below_the_other_in_the_time_of_a_step_and_its_neighbours(page: Any, tmp_path: Path) -> None:
    page_run(tmp_path / "r", steps=5)
    page_run(tmp_path / "older").spans.unlink()
    with served(tmp_path) as address:
        page.goto(f"{address}/#time?run=r")
        ready(page, "time")
        bars = page.locator('[data-chart="Roles side by side"] rect')
        sync_api.expect(bars).to_have_count(12)  # four roles in three steps
        sampling, scoring = (bars.filter(has_text=f"{name}, step 4: 1.5 s") for name in ("sampling", "scoring"))
        first, second = sampling.bounding_box(), scoring.bounding_box()
        assert first["x"] < second["x"] < first["x"] + first["width"] and first["y"] < second["y"]
        page.get_by_label("step and its neighbours").fill("1")
        page.get_by_label("step and its neighbours").press("Enter")
        sync_api.expect(bars).to_have_count(8)
        assert "step=1" in page.url
        page.goto(f"{address}/#time?run=older")
        page.locator('[data-chart="Seconds of each step"] path').first.wait_for()
        sync_api.expect(page.get_by_label("step and its neighbours")).to_be_hidden()


def test_sampling_for_a_step_is_drawn_beside_the_updates_of_the_step_before(page: Any, tmp_path: Path) -> None:
    folder = page_run(tmp_path / "r", steps=3)
    page_run(tmp_path / "turns", steps=3)
    ahead = {"staleness/groups/0": 1, "staleness/groups/1": 3, "overlap/wall": 4.0, "overlap/seconds": 2.0}
    folder.spans.unlink(), folder.metrics.unlink()
    with MetricsLog(folder.metrics) as log:
        for step in (1, 2, 3):
            start = 100.0 + 4 * step  # waits 1 s for the batch, works for 3; sampling goes on all the time
            loop: list[Span] = [("rollout", start, start + 1), ("update", start + 1, start + 4)]
            write_spans(folder.spans, step, [*loop, ("sampling", start - 3 if step > 1 else start, start + 1)])
            log.append(step, step_metrics(step) | ahead | {"overlap/won": 1 / 3, "idle/learner": 1, "idle/engine": 0})
    with served(tmp_path) as address:
        page.goto(f"{address}/#time?run=r")
        ready(page, "time")
        chart = page.locator('[data-chart="Roles side by side"]')
        sampling, update = (
            chart.locator("rect").filter(has_text=text) for text in ("sampling, step 2", "update, step 1")
        )
        boxes = sampling.bounding_box(), update.bounding_box()
        assert boxes[0]["x"] == pytest.approx(boxes[1]["x"]) and boxes[0]["width"] > boxes[1]["width"]
        line, rollout = chart.locator("line.grid"), chart.locator("rect").filter(has_text="rollout, step 2")
        places = [float(one.get_attribute("x1")) for one in line.all()]  # a step begins with its wait for a batch
        assert any(place == pytest.approx(float(rollout.get_attribute("x"))) for place in places)
        sync_api.expect(page.get_by_text("saved 33% of the time")).to_be_visible()
        sync_api.expect(page.locator('[data-chart="Groups trained on, by age in versions"] path.stack')).to_have_count(
            2
        )
        if SHOTS:
            page.screenshot(path=f"{SHOTS}/time-ahead.png", full_page=True)
        page.goto(f"{address}/#time?run=turns")
        sync_api.expect(page.get_by_text("could save 27% at most")).to_be_visible()
        sync_api.expect(page.locator('[data-chart="Groups trained on, by age in versions"]')).to_be_hidden()


def test_seeds_are_one_curve_or_several_and_settings_that_are_no_default_are_marked(page: Any, tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        with MetricsLog(page_run(tmp_path / f"s{seed}", settings={"seed": seed}).metrics) as log:
            log.append(3, {"accuracy": 0.1 * seed})
    with served(tmp_path) as address:
        page.goto(f"{address}/#overview?run=s1&run=s2&run=s3")
        ready(page, "overview")
        lines, legend = (
            page.locator('[data-chart="accuracy"] path.line'),
            page.locator('[data-chart="accuracy"] .legend'),
        )
        sync_api.expect(lines).to_have_count(1)
        sync_api.expect(legend).to_have_text("3 seeds (s1 …): mean, and lowest to highest")
        sync_api.expect(page.locator('[data-chart="accuracy"] path.band')).to_have_count(1)
        page.get_by_label("seeds as one curve").uncheck()
        sync_api.expect(lines).to_have_count(3)
        sync_api.expect(legend).to_have_text("s1s2s3")
        page.goto(f"{address}/#config?run=s2")
        ready(page, "config")
        page.get_by_label("not the default").check()
        rows = page.locator("tbody tr")
        sync_api.expect(rows).to_have_count(5)  # seed, model.path, reward.kind, training.steps, run.dir
        sync_api.expect(rows.first).to_have_text("seed2default 0")


def test_what_is_said_stays_true_when_a_run_goes_on_or_ends_and_no_news_of_it_came(page: Any, tmp_path: Path) -> None:
    shown, beside = page_run(tmp_path / "shown"), page_run(tmp_path / "beside")
    page.clock.install()
    page.route("**/api/changes*", lambda route: route.abort())
    with served(tmp_path) as address, contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        for folder, held in ((shown, first), (beside, second)):
            lock_file(held.enter_context((folder.root / ".lock").open("w")), fcntl.LOCK_EX)
        page.goto(f"{address}/#evaluation?run=shown")
        ready(page, "evaluation")
        page.get_by_text("No evaluation yet.").wait_for()
        sync_api.expect(page.locator(".run.running")).to_have_count(2)
        second.close()
        page.clock.run_for(16_000)
        sync_api.expect(page.locator(".run.running")).to_have_count(1)
        with MetricsLog(shown.metrics) as log:
            log.append(3, step_metrics(3) | {"eval/accuracy": 0.5, "eval/rows": 9})
        page.clock.run_for(16_000)
        page.get_by_role("heading", name="Evaluated after step 3").wait_for()
        first.close()
        page.clock.run_for(16_000)
        sync_api.expect(page.locator(".run.running")).to_have_count(0)
        page.locator("#tab-overview").click()
        ready(page, "overview")
        sync_api.expect(page.locator(".tiles")).to_contain_text("alarms on at the end")
