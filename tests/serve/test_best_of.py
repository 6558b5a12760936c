"""Best-of-n in chat requests, and rankers as endpoints of both servers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient

from dapo.config import load_reward
from dapo.errors import ConfigError
from dapo.ranking.endpoints import PATHS, Rankers, load_rankers, router
from dapo.ranking.score import load_ranker
from dapo.reward.build import make_scorer
from dapo.reward.server import ServerLimits, create_app
from dapo.reward.server import Service as RewardService
from dapo.serve.model import Limits
from served import PINNED, Served, served

MESSAGES: list[Any] = [{"role": "user", "content": "1+2="}]


def distinct(prompt: str, response: str) -> float:
    """Letters that occur; of the prompt, too, so that it shows what a ranker is given."""
    assert prompt == "1+2="
    return float(len(set(response)))


def broken(response: str) -> float:
    raise ValueError("no verdict")


def endless(response: str) -> float:
    return float("nan")


@pytest.fixture(scope="module")
def best(folder: Path) -> Iterator[Served]:
    found = {one.__name__: load_ranker(one) for one in (distinct, broken, endless)}
    rankers = Rankers(found, {"distinct": {"tiny": 3.0}})
    with served(folder, *PINNED, rankers=rankers) as found:
        yield found


def test_the_winner_and_all_scores_are_in_the_reply(best: Served) -> None:
    ask: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "seed": 3, "max_tokens": 20}
    found = best.openai().chat.completions.create(**ask, extra_body={"best_of": 8, "ranker": "distinct"})
    every = best.openai().chat.completions.create(**ask, n=8)
    texts = [choice.message.content or "" for choice in every.choices]
    ranking = found.model_extra["ranking"]
    assert found.choices[0].message.content == max(texts, key=lambda text: len(set(text)))
    assert [one["score"] for one in ranking] == sorted((len(set(text)) for text in texts), reverse=True)
    assert sorted(one["text"] for one in ranking) == sorted(texts)
    assert [one["choice"] for one in ranking] == [0, *[None] * 7] and found.model_extra["ranker"] == "distinct"
    assert found.usage == every.usage


def test_completions_of_several_prompts_and_n_choices(best: Served) -> None:
    body = best.complete(["1+2=", "1+2="], best_of=4, n=2, ranker="distinct", max_tokens=12, seed=1).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    by_choice = {one["choice"]: one["text"] for one in body["ranking"] if one["choice"] is not None}
    assert [choice["text"] for choice in body["choices"]] == [by_choice[k] for k in range(4)]
    assert [one["prompt"] for one in body["ranking"]] == [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"best_of": 4}, "say which one; there is distinct, broken, endless"),
        ({"best_of": 4, "ranker": "taste"}, "'taste' is not served; there is distinct, broken, endless"),
        ({"ranker": "distinct"}, "give best_of, such as 8"),
        ({"best_of": 2, "n": 3, "ranker": "distinct"}, "of which n=3"),
        ({"best_of": 2, "ranker": "distinct", "stream": True}, "known when all are written"),
        ({"best_of": 2, "ranker": "distinct", "temperature": 0}, "at 0 all best_of samples are the same"),
        ({"best_of": 2000, "ranker": "distinct"}, "this server takes"),
    ],
)
def test_what_cannot_be_served_is_refused_in_words(best: Served, how: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        best.openai().chat.completions.create(model="tiny", messages=MESSAGES, extra_body=how)


def test_a_ranker_that_fails_chooses_nothing(best: Served) -> None:
    reply = best.post("/v1/chat/completions", messages=MESSAGES, best_of=2, ranker="broken", max_tokens=5)
    assert reply.status_code == 503 and "no verdict" in reply.json()["error"]["message"]


def test_a_ranker_that_breaks_its_contract_is_no_fault_of_the_servers(best: Served, caplog: Any) -> None:
    asked: dict[str, Any] = {"ranker": "endless", "prompt": "p", "candidates": ["a"]}
    for path, more in (("/v1/rank", {}), ("/v1/chat/completions", {"messages": MESSAGES, "best_of": 2})):
        reply = best.post(path, **asked | more if path == "/v1/rank" else {"ranker": "endless"} | more)
        said = "the ranker could not score this: reward function endless: expected a finite number"
        assert reply.status_code == 503 and said in reply.json()["error"]["message"]
    assert not caplog.records


def test_rank_and_filter_as_endpoints(best: Served) -> None:
    asked = {"ranker": "distinct", "prompt": "1+2=", "candidates": ["aa", "abcd", "abc"]}
    ranking = best.post("/v1/rank", **asked).json()["ranking"]
    assert [(one["index"], one["score"]) for one in ranking] == [(1, 4.0), (2, 3.0), (0, 1.0)]
    kept = best.post("/v1/filter", **asked).json()  # calibrated for the model tiny
    assert [one["text"] for one in kept["kept"]] == ["abcd"]
    assert [one["index"] for one in best.post("/v1/filter", **asked, threshold=1).json()["kept"]] == [1, 2]
    assert best.post("/v1/filter", **asked | {"candidates": []}).json()["kept"] == []
    for wrong, said in (
        ({"model": "other"}, "no threshold for responses of other"),
        ({"ranker": "broken"}, "has no calibration here"),
        ({"ranker": "x"}, "'x' is not served"),
        ({"candidates": None}, "holds nothing to rank"),
        ({"labels": [10**309]}, "must be a list of finite numbers"),
    ):
        reply = best.post("/v1/filter", **asked | wrong)
        assert reply.status_code == 400 and said in reply.json()["error"]["message"], reply.text


def test_when_as_many_candidates_wait_as_may_others_are_refused_for_now(folder: Path) -> None:
    begun, go = threading.Event(), threading.Event()

    def slow(response: str) -> float:
        begun.set()
        assert go.wait(60)
        return 0.0

    asked: dict[str, Any] = {"prompt": "p", "candidates": ["a", "b"], "threshold": 0.5}
    few = Limits(max_waiting=3)
    with (
        served(folder, *PINNED, rankers=Rankers({"slow": load_ranker(slow)}), limits=few) as full,
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(full.post, "/v1/rank", **asked)
        try:
            assert begun.wait(60)
            chat = {"messages": MESSAGES, "best_of": 2, "ranker": "slow"}
            refused = [full.post(path, **asked) for path in ("/v1/rank", "/v1/filter")]
            refused.append(full.post("/v1/chat/completions", **chat))
        finally:
            go.set()
        for reply in refused:
            said = "2 candidates wait, and with these 2 it would be more than 3 (--max-waiting)"
            assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
            assert reply.json()["error"]["message"] == said
        assert first.result().status_code == full.post("/v1/rank", **asked).status_code == 200


def test_the_reward_server_ranks_too(tmp_path: Path) -> None:
    config = load_reward("exact")
    scorer = make_scorer(config)
    service = RewardService(scorer, config, ServerLimits())
    service.state = "ready"
    rankers = Rankers({"exact": scorer})
    client = TestClient(
        create_app(service, lambda _: router(lambda: rankers, 10, service.room)), base_url="http://127.0.0.1"
    )
    asked = {"prompt": "1+2=", "candidates": ["4", "3"], "answer": "3"}
    assert client.post("/v1/rank", json=asked).json()["ranking"][0]["text"] == "3"
    assert [one["index"] for one in client.post("/v1/filter", json=asked | {"threshold": 0}).json()["kept"]] == [1]
    assert service.room.waiting == 0
    service.room.waiting = service.room.most  # as items of /score count, too
    assert [client.post(path, json=asked | {"threshold": 0}).status_code for path in PATHS] == [429, 429]
    service.room.waiting = 0
    reply = client.post("/v1/rank", json=asked | {"candidates": ["1"] * 11})
    assert reply.status_code == 400 and "this server takes 10" in reply.text


def test_calibrations_belong_to_rankers(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"ranker": "math", "models": {"*": {"threshold": 0.5}}}))
    assert load_rankers({"sums": "math"}, {"sums": str(file)}).thresholds == {"sums": {"*": 0.5}}
    with pytest.raises(ConfigError, match="no --ranker of this name"):
        load_rankers({}, {"sums": str(file)})
