"""The playground and the comparison in a real browser, over events that were made up: what arrives is what is seen."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.responses import HTMLResponse, Response
from starlette.staticfiles import StaticFiles

import dapo.commands.ui
from dapo.commands.ui.answering import Answerer, Asked, Busy
from dapo.errors import UserError
from dapo.evaluation.votes import read_votes
from ui_run import HELD_OUT, run_with_models, serving

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="the page was not tested: needs Debian's package chromium")
WAIT = 60_000
sync_api.expect.set_options(timeout=WAIT)

HOSTILE = "<script>document.title = 'gone'</script><img src=x onerror=\"document.title = 'gone'\"> & \u00e9"
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"


class Scripted(Answerer):
    """Both models write HOSTILE in two pieces; the second one is right."""

    busy = False

    def begin(self, asked: Asked) -> AsyncGenerator[dict[str, Any]]:
        if self.busy:
            raise Busy
        return self._events()

    async def _events(self) -> AsyncGenerator[dict[str, Any]]:
        yield {"event": "status", "message": "answering"}
        for side in (0, 1):
            yield {"event": "tokens", "side": side, "index": 0, "start": 0, "tokens": [["<scr", 0.5]]}
            tokens = [["<scr", 0.5, [["<scr", 0.5], ["#", 0.25]]], [HOSTILE[4:], 0.125, []]]
            verdict = {"correct": bool(side), "reward": float(side), "extracted": "7", "parts": {}, "error": None}
            yield {
                **{"event": "sample", "side": side, "index": 0, "tokens": tokens},
                **{"text": f"{HOSTILE} {side}", "length": 2, "finish_reason": "stop", "verdict": verdict},
            }
        yield {"event": "done", "seconds": 0.5}


def add_page(app: FastAPI) -> None:
    """A page that holds one view and nothing else, under the policy of the real one."""
    headers = {"Content-Security-Policy": POLICY}
    app.mount("/static", StaticFiles(directory=Path(dapo.commands.ui.__file__).parent / "static"))

    @app.get("/start/{view}.js")
    def start(view: str) -> Response:
        code = f'import {{ mount }} from "/static/{view}.js"; mount(document.querySelector("main"), {{ run: "r" }});'
        return Response(code, media_type="text/javascript")

    @app.get("/view/{view}")
    def page(view: str) -> HTMLResponse:
        style = '<link rel="stylesheet" href="/static/style.css">'
        text = (
            f'<!doctype html><title>t</title>{style}<main></main><script type="module" src="/start/{view}.js"></script>'
        )
        return HTMLResponse(text, headers=headers)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def opened(browser: Any, address: str, errors: list[str]) -> Any:
    page = browser.new_page()
    page.set_default_timeout(WAIT)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(address)
    return page


def test_answers_are_shown_as_text_with_verdicts_and_the_probability_under_the_pointer(
    browser: Any, tmp_path: Path
) -> None:
    errors: list[str] = []
    answerer = Scripted()
    with serving(run_with_models(tmp_path / "r", {"model-before": 0, "model-after": 1}), answerer, add_page) as client:
        page = opened(browser, str(client.base_url.join("/view/playground")), errors)
        page.get_by_role("button", name="Ask both").click()
        page.get_by_text("done in 0.5 s").wait_for()
        assert page.locator("pre").all_inner_texts() == ["<scr" + HOSTILE[4:]] * 2
        assert page.locator(".card header").nth(0).inner_text().split()[0] == "wrong"
        assert page.locator(".card header").nth(1).inner_text().split()[0] == "right"
        page.locator("pre .token").first.hover()
        told = page.locator(".told").first
        sync_api.expect(told).to_have_text('"<scr" 50.0%; likely here: "#" 25.0%')
        page.mouse.move(0, 0)  # or it is at another token when these move
        page.locator("pre").first.press("ArrowRight")
        sync_api.expect(told).to_contain_text("12.5%")
        assert page.title() == "t" and errors == []
        answerer.busy = True
        page.get_by_role("button", name="Ask both").click()
        page.get_by_text("other answers are being written just now").wait_for()


def test_a_key_votes_once_on_answers_whose_models_are_not_shown(browser: Any, tmp_path: Path) -> None:
    errors: list[str] = []
    root = run_with_models(tmp_path / "r", {"model-before": 0, "model-after": 1})
    with serving(root, Scripted(), add_page) as client:
        page = opened(browser, str(client.base_url.join("/view/votes")), errors)
        page.get_by_label("your name").fill("ann")
        page.get_by_role("button", name="Compare").click()
        page.get_by_role("button", name="Left is better").wait_for()
        prompt, left, right = page.locator("pre").all_inner_texts()
        assert prompt in {row["prompt"] for row in HELD_OUT} and {left, right} == {f"{HOSTILE} 0", f"{HOSTILE} 1"}
        assert "model-" not in "".join(page.locator("article").all_inner_texts())
        page.keyboard.press("ArrowLeft")
        page.get_by_text("votes cast: 1;").wait_for()
        page.get_by_role("button", name="Show result").click()
        page.get_by_role("table").wait_for()
        assert page.title() == "t" and errors == []
    (vote,) = read_votes(root)
    assert (vote.who, vote.prompt, vote.choice) == ("ann", prompt, "left")
    assert vote.chosen is not None and vote.chosen.response == left


def test_a_vote_that_was_not_kept_is_sent_again(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise UserError("no space left")

    root = run_with_models(tmp_path / "r", {"model-before": 0, "model-after": 1})
    with serving(root, Scripted(), add_page) as client:
        page = opened(browser, str(client.base_url.join("/view/votes")), [])
        page.get_by_role("button", name="Compare").click()
        with monkeypatch.context() as patch:
            patch.setattr("dapo.commands.ui.playground.add_vote", full)
            page.get_by_role("button", name="Right is better").click()
            page.get_by_text("this vote is not kept yet: no space left").wait_for()
        page.get_by_role("button", name="Send the vote again").click()
        page.get_by_text("votes cast: 1;").wait_for()
    assert [vote.choice for vote in read_votes(root)] == ["right"]
