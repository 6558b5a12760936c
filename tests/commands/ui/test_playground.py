"""The playground: two models of a run answer as they would answer anybody, and the run's reward judges."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import dapo.commands.ui
from dapo.commands.ui import answering, models
from dapo.commands.ui.answering import Answerer, Asked, Busy
from dapo.commands.ui.models import Question, Questions, models_of
from dapo.config import build_config
from dapo.errors import UserError
from dapo.inference.found_model import find_model
from dapo.inference.generate import Response, generate_responses
from dapo.inference.model import inference_config
from dapo.inference.stream import Pieces
from dapo.observe.progress import QuietListener
from ui_run import HELD_OUT, run_with_models, serving, stream


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    seeds = {"model-before": 0, "step-00002": 1, "model-after": 2}
    return run_with_models(tmp_path_factory.mktemp("playground") / "r", seeds)


@pytest.fixture(scope="module")
def client(run: Path) -> Iterator[httpx.Client]:
    with serving(run) as found:
        yield found


def samples_of(events: list[dict[str, Any]]) -> dict[tuple[int, int], dict[str, Any]]:
    assert events[-1]["event"] == "done", events[-1]
    return {(e["side"], e["index"]): e for e in events if e["event"] == "sample"}


# --- over HTTP ----------------------------------------------------------------------------------------------------


def test_the_models_are_listed_in_the_order_of_the_run(client: httpx.Client) -> None:
    about = client.get("playground", params={"run": "r"}).json()
    assert [model["name"] for model in about["models"]] == ["model-before", "step-00002", "model-after"]
    assert (about["max_tokens"], about["reward"]) == (24, "exact")


def test_prompts_to_pick_are_the_held_out_rows(client: httpx.Client) -> None:
    found = client.get("questions", params={"run": "r", "first": 3, "count": 2}).json()
    assert found["held_out"] and found["total"] == len(HELD_OUT)
    assert found["questions"] == [{"row": row, **HELD_OUT[row]} for row in (3, 4)]


def test_both_models_answer_with_text_probabilities_and_a_verdict(client: httpx.Client) -> None:
    samples = samples_of(stream(client, row=7, samples=3))
    assert set(samples) == {(side, index) for side in (0, 1) for index in range(3)}
    for sample in samples.values():
        text = sample["text"]
        assert "".join(token[0] for token in sample["tokens"]) == text
        assert len(sample["tokens"]) == sample["length"] <= 24
        for _, probability, best in sample["tokens"]:
            assert 0 <= probability <= 1 and [p for _, p in best] == sorted((p for _, p in best), reverse=True)
        answer = re.sub(r"\s", "", text.rpartition("#")[2]) if "#" in text else None
        assert sample["verdict"]["correct"] is (answer == HELD_OUT[7]["answer"])
        assert sample["verdict"]["error"] is None


def test_the_answers_are_those_of_dapo_generate(run: Path, client: httpx.Client) -> None:
    prompt = HELD_OUT[0]["prompt"]
    samples = samples_of(stream(client, prompt=prompt, samples=1, temperature=0.0))
    for side, name in enumerate(("model-before", "model-after")):
        found: list[Response] = []
        layer = {"evaluation": {"data": [], "temperature": 0.0}, "runtime": {"device": "cpu"}}
        generate_responses(
            inference_config(find_model(str(run / name)), layer), [prompt], QuietListener(), found.append
        )
        assert samples[side, 0]["text"] == found[0].text


def test_a_seed_gives_its_answers_again_and_another_one_others(client: httpx.Client) -> None:
    first, again, other = (
        [s["text"] for s in samples_of(stream(client, row=0, samples=4, seed=seed)).values()] for seed in (1, 1, 2)
    )
    assert sorted(first) == sorted(again) != sorted(other)


def test_tokens_come_while_it_writes_and_are_those_of_the_answer(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "PERIOD", 0.0)
    events = stream(client, row=0, samples=4, seed=5)
    samples = samples_of(events)
    written: dict[tuple[int, int], list[str]] = {}
    for event in events:
        if event["event"] == "tokens":
            place = event["side"], event["index"]
            assert event["start"] == len(written.setdefault(place, []))  # nothing twice, nothing left out
            written[place] += [text for text, _ in event["tokens"]]
    assert written
    for place, texts in written.items():
        assert [token[0] for token in samples[place]["tokens"]][: len(texts)] == texts


def test_a_typed_prompt_has_a_verdict_if_its_answer_is_given(client: httpx.Client) -> None:
    without = samples_of(stream(client, prompt="9*9=", samples=1))[0, 0]["verdict"]
    assert without["correct"] is None and without["error"] == "the reward needs a reference answer"
    given = samples_of(stream(client, prompt="9*9=", answer="1", samples=1))[0, 0]["verdict"]
    assert given["correct"] is (given["extracted"] == "1") and given["error"] is None


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (
            {"models": ["model-before", "../../secret"], "row": 0},
            "has no model '../../secret'; it has model-before, step",
        ),
        ({"prompt": "  "}, "the prompt is empty"),
        ({"row": 25}, "there is no row 25; there are 25, from 0 on"),
        ({"row": -1}, "there is no row -1"),
    ],
)
def test_a_mistake_is_said_before_anything_is_loaded(client: httpx.Client, wanted: dict[str, Any], said: str) -> None:
    body = {"run": "r", "models": ["model-before", "model-after"], **wanted}
    answer = client.post("playground", json=body)
    assert answer.status_code == 422 and said in answer.json()["error"]


@pytest.mark.parametrize(
    "wanted", [{"samples": 9}, {"max_tokens": 10**6}, {"models": ["model-after"]}, {"temperature": -1}]
)
def test_more_than_is_allowed_is_refused(client: httpx.Client, wanted: dict[str, Any]) -> None:
    body = {"run": "r", "models": ["model-before", "model-after"], "row": 0, **wanted}
    assert client.post("playground", json=body).status_code == 422


def test_an_unknown_run_is_not_found(client: httpx.Client) -> None:
    assert client.get("playground", params={"run": "../r"}).status_code == 404


def test_a_prompt_that_is_too_long_is_refused_with_the_limit(client: httpx.Client) -> None:
    last = stream(client, prompt="1+" * 9 + "1=")[-1]
    assert (
        last["event"] == "error"
        and "the prompt has 20 tokens, but the run was made for prompts of up to 16" in last["message"]
    )


def test_who_comes_second_is_told_that_it_is_busy(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, loading = threading.Event(), threading.Event()
    real = models.load

    def slow(path: Path) -> models.Loaded:
        loading.set()
        assert free.wait(30)
        return real(path)

    monkeypatch.setattr(models, "load", slow)
    with serving(run) as client:
        events: list[dict[str, Any]] = []
        first = threading.Thread(target=lambda: events.extend(stream(client, row=0, samples=1)))
        first.start()
        assert loading.wait(30)
        body = {"run": "r", "models": ["model-before", "model-after"], "row": 0}
        second = httpx.post(f"{client.base_url}playground", json=body, trust_env=False)
        free.set()
        first.join(60)
    assert second.status_code == 409 and "try again in a moment" in second.json()["error"]
    assert events[-1]["event"] == "done"


# --- without ------------------------------------------------------------------------------------------------------


def asked(root: Path, *names: str, question: Question | None = None, **others: Any) -> Asked:
    found = models_of(root)
    return Asked(root, [found[name] for name in names], question or Questions(root)[0], **others)


async def all_of(answerer: Answerer, what: Asked) -> list[dict[str, Any]]:
    return [event async for event in answerer.begin(what)]


def test_two_models_are_held_and_each_is_loaded_once_while_it_is(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    real = models.load
    monkeypatch.setattr(models, "load", lambda path: loaded.append(path.parent.name + path.name) or real(path))

    async def ask() -> None:
        answerer = Answerer()
        for pair in (("model-before", "model-after"),) * 2 + (("model-after", "step-00002"),) * 2:
            assert (await all_of(answerer, asked(run, *pair)))[-1]["event"] == "done"
            assert len(answerer._models._held) == 2
        await answerer.close()

    asyncio.run(ask())
    assert loaded == ["rmodel-before", "rmodel-after", "step-00002model"]


def test_who_stops_watching_ends_it_and_another_may_ask(run: Path) -> None:
    async def ask() -> None:
        answerer = Answerer()
        watched = answerer.begin(asked(run, "model-before", "model-after"))
        with pytest.raises(Busy):
            answerer.begin(asked(run, "model-before", "model-after"))
        assert (await anext(watched))["event"] == "status"
        await watched.aclose()
        await asyncio.sleep(0)
        assert (await all_of(answerer, asked(run, "model-before", "model-after")))[-1]["event"] == "done"
        await answerer.close()

    asyncio.run(ask())


def test_answers_that_take_too_long_are_given_up(run: Path) -> None:
    async def ask() -> list[dict[str, Any]]:
        answerer = Answerer(seconds=0.0)
        try:
            return await all_of(answerer, asked(run, "model-before", "model-after", samples=8))
        finally:
            await answerer.close()

    assert asyncio.run(ask())[-1] == {"event": "error", "message": "not done after 0 s, and given up"}


def test_a_damaged_model_is_said_and_the_next_question_is_answered(tmp_path: Path) -> None:
    root = run_with_models(tmp_path / "r", {"model-before": 0, "model-after": 1, "step-00001": 2})
    (root / "checkpoints/step-00001/model/model.safetensors").write_bytes(b"no")

    async def ask() -> None:
        answerer = Answerer()
        last = (await all_of(answerer, asked(root, "model-before", "step-00001")))[-1]
        assert last["event"] == "error" and "Traceback" not in last["message"] and "step-00001" in last["message"]
        assert (await all_of(answerer, asked(root, "model-before", "model-after")))[-1]["event"] == "done"
        await answerer.close()

    asyncio.run(ask())


def test_a_reward_from_python_gives_no_verdict_and_says_why(tmp_path: Path) -> None:
    root = run_with_models(tmp_path / "r", {"model-before": 0, "model-after": 1})
    fingerprint = {"reward": {"kind": "python", "function": "my_reward"}}
    (root / "fingerprint.json").write_text(json.dumps(fingerprint), encoding="utf-8")
    with serving(root) as client:
        verdict = samples_of(stream(client, row=0, samples=1))[1, 0]["verdict"]
    assert verdict["correct"] is None and "the Python function my_reward" in verdict["error"]


def test_a_reward_model_leaves_the_gpu_to_the_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = build_config({"model": {"path": "m"}, "reward": {"kind": "model", "path": "r", "correct_above": 0}})
    monkeypatch.setattr(answering, "recipe_of", lambda root: config)
    reward: Any = answering._reward_of(asked(run, "model-before"))
    assert (reward.path, reward.device) == ("r", "cpu")


def test_without_its_held_out_rows_a_run_offers_what_it_was_trained_on(tmp_path: Path) -> None:
    root = run_with_models(tmp_path / "r", {})
    (tmp_path / "r-rows.jsonl").unlink()
    with pytest.raises(UserError, match="there are no prompts to pick"):
        Questions(root)
    lines = [
        {"row": 12, "prompt": "1+1=", "gold": "2"},
        {"row": 12, "prompt": "1+1=", "gold": "2"},
        {"row": 5, "prompt": "2+2=\ud800"},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (root / "samples/step-00003.jsonl").write_text(text, encoding="utf-8")
    found = Questions(root)
    assert not found.held_out
    assert [q.as_json() for q in found.some(0, 9)] == [
        {"row": 0, "prompt": "1+1=", "answer": "2"},
        {"row": 1, "prompt": "2+2=?", "answer": None},  # half a surrogate pair cannot be sent
    ]


def test_a_recipe_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    root = run_with_models(tmp_path / "r", {"model-before": 0})
    (root / "config.yaml").write_text("nonsense: 1\n", encoding="utf-8")
    with serving(root) as client:
        answer = client.get("playground", params={"run": "r"})
    assert answer.status_code == 422 and "nonsense" in answer.json()["error"]


# --- the text of tokens -------------------------------------------------------------------------------------------


def test_what_never_becomes_a_character_is_shown_at_the_end() -> None:
    decode = Pieces(lambda ids: bytes(ids).decode("utf-8", "replace"))
    assert decode.add(b"a") + decode.add("é".encode()[:1], last=True) == ["a", "\ufffd"]


def test_a_space_that_a_decoder_takes_from_the_first_token_is_not_lost_later() -> None:
    words = {1: "▁Hello", 2: "▁world", 3: "!"}
    pieces = Pieces(lambda ids: "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")).add([1, 2, 3])
    assert pieces == ["Hello", " world", "!"]


def test_the_page_puts_text_in_as_text() -> None:
    scripts = [
        Path(dapo.commands.ui.__file__).parent / "static" / f"{name}.js"
        for name in ("dom", "tools", "zoom", "charts", "playground", "votes", "views/groups")
    ]
    for script in scripts:
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", script.read_text())
