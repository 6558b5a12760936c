"""The proposer: what it makes up is checked, rewarded for being half solved, and bounded where it is of no use."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from data_cases import PLAIN

from dapo.config import DataConfig
from dapo.config.data import ProposerConfig
from dapo.data.proposer import Proposer
from dapo.data.source import load_prompts
from dapo.records import Group, Prompt, Reward, Sample
from run_cases import run, steps_of, text_sum

HELD = "How many marbles does the oldest of the three brothers have after he gave away half of all of them"
ONE = np.zeros(1, np.int32)


class Model:
    """Proposes ``proposals`` in turn, and solves sums."""

    def __init__(self, proposals):
        self.proposals, self.asked = iter(proposals), []

    def __call__(self, text):
        self.asked.append(text)
        if text.startswith("Make up"):
            found = next(self.proposals)
            if isinstance(found, BaseException):
                raise found
            return "\n".join(line if isinstance(line, str) else json.dumps(line) for line in found)
        return f"I think.\nAnswer: {eval(text.partition('=')[0])}.0"


def proposer(model, told=None, **keys):
    config = ProposerConfig(url="http://127.0.0.1:1/v1", **keys)
    return Proposer(config, ["1+1="], [HELD], [].append if told is None else told.append, model)


def taken(one, replies=1):
    rows = []
    for _ in range(replies):
        for _ in range(2):
            while (row := one.take()) is not None:
                rows.append((row.prompt, row.answer))
            if one._request is not None:
                one._request.exception(timeout=10)
    while (row := one.take()) is not None:
        rows.append((row.prompt, row.answer))
    return rows


def sums(*pairs):
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]


def group(prompt, answer, right, of=4):
    rewards = [Reward(k < right, 1.0) for k in range(of)]
    samples = [
        Sample(0, k, ONE, ONE.astype(np.float32), ONE, "stop", reward=reward) for k, reward in enumerate(rewards)
    ]
    return Group(0, Prompt(99, prompt, (), answer, {"source": "proposer"}), tuple(samples))


def test_new_proposals_whose_answer_holds_are_taken_and_others_are_counted():
    model = Model(
        [
            [
                *sums((1, 1), (2, 3), (2, 3)),
                {"prompt": "4+4=", "answer": "9"},
                "{broken",
                {"prompt": HELD, "answer": 1},
            ],
            [],
        ]
    )
    one = proposer(model, max_requests=1)
    assert taken(one) == [("2+3=", "5")]
    found = one.metrics()
    assert {
        name: found[f"proposer/{name}"] for name in ("asked", "accepted", "repeated", "wrong", "bad", "evaluation")
    } == {**{"asked": 1, "accepted": 1, "repeated": 2, "wrong": 1, "bad": 1, "evaluation": 1}}
    assert taken(one, 3) == [] and one.metrics()["proposer/asked"] == 1  # max_requests


def test_half_solved_ones_are_its_examples_and_a_feed_to_train_it_on(tmp_path):
    feed = tmp_path / "feed.jsonl"
    model = Model([sums((1, 2)), sums((2, 2))])
    one = proposer(model, feed=str(feed), max_requests=2)
    one.heard([group("hard", "1", 0), group("half", "2", 2), group("easy", "3", 4), group("most", "4", 3)])
    taken(one, 2)
    shown = [
        json.loads(line)["prompt"] for line in model.asked[0].splitlines() if line.startswith("{") and "..." not in line
    ]
    assert shown[:2] == ["half", "most"]
    rewards = {line["prompt"]: line["reward"] for line in map(json.loads, feed.read_text().splitlines())}
    assert rewards == {"hard": 0, "half": 1, "easy": 0, "most": 0.5} and one.metrics()["proposer/reward"] == 0.375


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (sums((1, 1)), "repeated 4"),
        ([{"prompt": "2+2=", "answer": "5"}], "wrong 4"),
        (["no idea"], "bad 4"),
        ([{"prompt": "half a character: \ud800", "answer": "1"}], "bad 4"),
        ([{"prompt": "2+2=", "answer": None}], "bad 4"),
        (SystemExit("bye"), "bye"),
        (OSError("gone"), "gone"),
    ],
)
def test_one_that_repeats_itself_or_fails_is_named_and_asked_no_more(reply, why):
    told = []
    one = proposer(Model([reply] * 200), told)
    assert taken(one, 60) == [] and len(told) == 1
    assert "asked no more" in told[0] and why in told[0] and one.metrics()["proposer/asked"] == 40


def test_a_resumed_run_draws_what_was_taken_and_takes_none_of_it_again():
    one = proposer(Model([sums((1, 2), (3, 4), (5, 6))]), max_requests=1)
    one.take()
    one._request.result()
    first = one.take().prompt
    state = json.loads(json.dumps(one.state()))
    again = proposer(Model([sums((1, 2), (7, 8))]), max_requests=2)
    again.load_state(state)
    assert first == "1+2=" and taken(again, 2) == [("3+4=", "7"), ("5+6=", "11"), ("7+8=", "15")]


def test_a_program_of_the_users_may_check_and_draws_are_a_share(tmp_path):
    (tmp_path / "check.py").write_text("def even(prompt, answer):\n    return int(answer) % 2 == 0\n")
    one = proposer(
        Model([sums(*((k, 1) for k in range(8)))] * 9), verify=f"{tmp_path}/check.py:even", share=0.5, max_requests=1
    )
    one.take()
    one._request.result()
    rows = [{"prompt": f"p{k}", "answer": k} for k in range(30)]
    source = load_prompts(DataConfig(template="plain"), rows, PLAIN, beside=[one])
    drawn = [source.next() for _ in range(30)]
    made = [prompt for prompt in drawn if prompt.row >= 30]
    assert [(p.text, p.answer) for p in made] == [("3+1=", "4"), ("5+1=", "6"), ("7+1=", "8")]  # 1+1= is known
    assert source.metrics()["proposer/wrong"] == 4


def slow(prompt, response):
    time.sleep(0.005)
    return text_sum(prompt, response)


def test_a_run_with_a_proposer_behind_the_openai_protocol(tmp_path):
    model, numbers = Model(sums((k % 9, k // 9)) for k in range(50, 80)), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            numbers.append(body["model"])
            said = model(body["messages"][0]["content"])
            reply = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    keys = {"data.proposer": {"url": f"http://127.0.0.1:{server.server_port}/v1", "share": 0.5, "model": "m"}}
    try:
        run(tmp_path / "run", keys | {"training.steps": 4}, reward=slow)
    finally:
        server.shutdown()
    last = steps_of(tmp_path / "run")[-1]
    assert set(numbers) == {"m"} and last["proposer/drawn"] > 0 and last["proposer/accepted"] > 0
    assert 0 <= last["proposer/reward"] <= 1
