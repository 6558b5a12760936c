"""Ranking: one door to reward models, implicit rewards and rules; batch, order and padding change nothing."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from functools import reduce
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dapo
from dapo.data.examples import PolicyText
from dapo.data.rows import BadRow, PythonRows
from dapo.errors import ConfigError, DataError, ModelError, RewardError
from dapo.model.loading import load_model
from dapo.ranking.measures import agreement, best_of, best_of_n, least_sure, summary
from dapo.ranking.rows import Candidates, candidates, read_candidates
from dapo.ranking.score import Scored, is_reward_model, load_ranker, score_rows
from dapo.reward.model.text import PairText
from ranking_cases import trained
from stage_cases import ROWS

TEXTS = ["#3", "#4;1+2=3;#4", "", "#3", "12;#9"]


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained("reward_model", tmp_path_factory.mktemp("rm") / "run")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained("reward_model", tmp_path_factory.mktemp("lora") / "run", **{"model.lora.rank": 2})


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained("dpo", tmp_path_factory.mktemp("dpo") / "run")


def scored(*scores: float | None) -> list[Scored]:
    return [Scored(k, f"text {k}", score) for k, score in enumerate(scores)]


@pytest.mark.parametrize("kind", ["reward_model", "adapter", "policy"])
def test_batch_order_and_padding_change_nothing(kind: str, request: pytest.FixtureRequest) -> None:
    folder = str(request.getfixturevalue(kind))
    found = dapo.rank(folder, "1+2=", TEXTS)
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    by_place = {one.index: one.score for one in found}
    assert by_place[0] == by_place[3]
    alone = {k: dapo.rank(folder, "1+2=", [text])[0].score for k, text in enumerate(TEXTS)}
    again = {len(TEXTS) - 1 - one.index: one.score for one in dapo.rank(folder, "1+2=", TEXTS[::-1])}
    among = score_rows(load_ranker(folder), [Candidates("1+2=", (*TEXTS, "#5" * 12)), Candidates("7+7=", ("#4",))])[0]
    for k, score in by_place.items():
        assert score == pytest.approx(alone[k], abs=1e-5) == pytest.approx(again[k], abs=1e-5)
        assert among[k].score == pytest.approx(score, abs=1e-5)


def test_the_implicit_reward_is_that_of_the_stage(policy: Path) -> None:
    """Its summary's accuracy on the rows it held out, and the formula with Transformers' own log-probabilities."""
    rows = read_candidates(PythonRows(ROWS["dpo"][:10], "rows"))
    found = score_rows(load_ranker(policy), rows)
    accuracy = json.loads((policy / "summary.json").read_text())["accuracy_after"]
    assert summary(rows, found)["agreement"]["accuracy"].value == pytest.approx(accuracy)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    def logprob(path: Path) -> float:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
        prompt, response = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in ("1+2=", "#3"))
        ids = torch.tensor([[*prompt, *response, tokenizer.eos_token_id]])
        with torch.no_grad():
            logprobs = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        return float(logprobs[len(prompt) - 1 :].sum())

    expected = 0.1 * (logprob(policy / "model-after") - logprob(policy.parent / "base"))
    assert dapo.rank(policy, "1+2=", ["#3"])[0].score == pytest.approx(expected, abs=1e-5)
    by_hand = dapo.rank(policy / "model-after", "1+2=", ["#3"], reference=str(policy.parent / "base"))
    assert by_hand[0].score == pytest.approx(expected, abs=1e-5)
    for where, reference in ((policy, None), (policy / "model-after", str(policy.parent / "base"))):
        changed = {"dpo.beta": 0.2, "runtime.device": "auto"}  # the last one is no beta
        doubled = dapo.rank(where, "1+2=", ["#3"], reference=reference, settings=changed)
        assert doubled[0].score == pytest.approx(2 * expected, abs=1e-5)
    for wrong, said in (
        ({"dpo.beta": -1}, "greater than 0"),
        ({"reward.kind": "exact"}, "no effect here"),
        ({"evaluation.data": ["rows.jsonl"]}, "no effect here"),
        ({"rollout.temperature": 0.5}, "no effect here; leave it out"),
        ({"model.compute_dtype": "bfloat16"}, "no effect here; leave it out"),
        ({"data.answer_key": "a"}, "no effect here; leave it out"),
    ):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))}.*{said}"):
            dapo.rank(policy, "1+2=", ["#3"], settings=wrong)


@pytest.mark.parametrize("asked, device", [("auto", "cuda"), ("cpu", "cpu")])
def test_a_policy_ranks_on_the_device_that_is_asked_for(
    policy: Path, asked: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ranker: Any = load_ranker(policy, overrides=[f"runtime.device={asked}"])
    assert ranker._config.runtime.device == device


def test_a_language_model_alone_ranks_nothing(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"its probabilities alone rank nothing.*--reference"):
        load_ranker(policy.parent / "base")
    with pytest.raises(ModelError, match="no such folder"):
        load_ranker(policy.parent / "no-such")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "adapter_config.json").write_text('{"peft_type": "LO')
    with pytest.raises(ModelError, match=r"damaged: adapter_config.json cannot be read: Unterminated string"):
        load_ranker(damaged)


def test_rules_and_functions_rank_and_a_failed_score_is_last() -> None:
    assert dapo.rank("math", "1+2=", ["\\boxed{4}", "\\boxed{3}"], answer="3")[0].text == "\\boxed{3}"

    def longest(response: str) -> float:
        return float(len(response)) / (response != "broken")

    found = dapo.rank(longest, "", ["a", "broken", "abc"])
    assert [one.text for one in found] == ["abc", "a", "broken"]
    assert found[-1].score is None and "division by zero" in str(found[-1].error)
    assert dapo.filter(longest, "", ["abc", "broken", "a"], threshold=1) == [Scored(0, "abc", 3.0)]
    rows = [Candidates("", ("broken", "a"), place="f:1")]
    with pytest.raises(RewardError, match="1 of 2 scores failed, such as f:1"):
        score_rows(load_ranker(longest), rows)


@pytest.mark.parametrize("kind", ["reward_model", "policy"])
def test_letters_that_the_tokenizer_lacks_are_told_once(
    kind: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    ranker = str(request.getfixturevalue(kind))
    rows = [Candidates("1+2=", ("#3", "é3"), place="f:1"), Candidates("Zé", ("#3",), place="f:2")]
    score_rows(load_ranker(ranker), rows)
    (told,) = caplog.messages
    assert told.startswith("2 of 3 responses, with their prompts,") and "has no token for, such as 'é' in f:1: " in told
    caplog.clear()
    score_rows(load_ranker(ranker), [Candidates("1+2=", TEXTS)])
    score_rows(load_ranker("math"), [Candidates("1+2=", ("é",), answer="3")])
    assert not caplog.messages


@pytest.mark.parametrize("kind", ["reward_model", "policy"])
def test_letters_are_looked_for_once_each_and_not_on_the_event_loop(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranker, threads = load_ranker(str(request.getfixturevalue(kind))), list[int]()

    def watched(*arguments: Any) -> str:
        threads.append(threading.get_ident())
        return "123+="

    for text in (PairText, PolicyText):
        monkeypatch.setattr(text, "read_back", watched)
    score_rows(ranker, [Candidates("1+2=", ("3", "33", "333", "1", "12"))])
    assert len(threads) == 1 and threads[0] != threading.get_ident()


def test_a_composed_reward_tells_of_letters_that_its_models_lack(
    reward_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taste = f"{{kind: model, path: {reward_model}/model-after, template: plain, max_length: 32}}"
    recipe = tmp_path / "both.yaml"
    recipe.write_text(
        f"reward: {{kind: compose, parts: {{rule: {{reward: {{kind: exact}}}}, taste: {{reward: {taste}}}}}}}"
    )
    score_rows(load_ranker(str(recipe)), [Candidates("1+2=", ("#3", "\u00e93"), answer="3", place="f:1")])
    (told,) = caplog.messages
    assert told.startswith("1 of 2 responses,") and "has no token for, such as '\u00e9' in f:1: " in told


def test_an_empty_result_stays_empty() -> None:
    assert dapo.rank(len, "", []) == []
    assert dapo.filter(lambda response: 0.0, "1+2=", ["a", "b"], threshold=0.5) == []


@pytest.mark.parametrize(
    ("row", "texts", "labels"),
    [
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, ("a", "b"), (1.0, 0.0)),
        ({"prompt": "p", "correct_code": "a", "incorrect_code": "b"}, ("a", "b"), (1.0, 0.0)),
        ({"prompt": "p", "candidates": ["a", "b"], "labels": [False, 1]}, ("a", "b"), (0.0, 1.0)),
        ({"prompt": "p", "candidates": []}, (), ()),
        ({"prompt": "p", "responses": ["a", "b", "c"]}, ("a", "b", "c"), (0.0, -1.0, -2.0)),
        ({"response": "a", "label": True, "model": "m"}, ("a",), (1.0,)),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "candidates": ["c"]}, ("c",), ()),  # samples of its prompt
    ],
)
def test_forms_of_rows(row: dict, texts: tuple, labels: tuple) -> None:
    found = candidates(row)
    assert (found.texts, found.labels) == (texts, labels)
    assert found.model == row.get("model", "*")


def test_what_holds_nothing_to_rank_is_named() -> None:
    with pytest.raises(BadRow, match="what would work: candidates"):
        candidates({"prompt": "p", "answer": "3"})
    with pytest.raises(DataError, match=r"rows\[1\]: 1 labels for 2 responses"):
        read_candidates(PythonRows([{"response": "a"}, {"candidates": ["a", "b"], "labels": [1]}], "rows"))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"candidates": ["\ud800"]}, "half a surrogate pair"),
        ({"labels": [10**400]}, "finite numbers"),
        ({"labels": [float("nan")]}, "finite numbers"),
        ({"meta": reduce(lambda inner, _: [inner], range(5000), 0)}, "nested too deeply"),
    ],
)
def test_what_no_ranker_takes_is_a_bad_row(more: dict, said: str) -> None:
    with pytest.raises(BadRow, match=said):
        candidates({"prompt": "p", "candidates": ["a"]} | more)


def test_a_number_of_a_file_that_no_float_holds_is_text(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"candidates": ["a"], "labels": [1' + "0" * 400 + "]}\n")
    with pytest.raises(DataError, match="'labels' must be a list of finite numbers"):
        read_candidates([str(tmp_path / "rows.jsonl")])


def test_one_text_that_is_too_long_costs_no_other_its_score(policy: Path) -> None:
    found = dapo.rank(policy, "1+2=", ["#3", "#" + "1" * 300])
    assert found[0].score is not None and found[1].error == "implicit reward: more than 256 tokens with the prompt"


def test_threads_that_load_at_once_wait_for_each_other(policy: Path) -> None:
    """In a process of its own, as it is the first import of Transformers that breaks."""
    work = f"load_ranker({str(policy)!r})", f"load_tokenizer({str(policy / 'model-after')!r})"
    code = f"""
import threading
from dapo.model.loading import load_tokenizer
from dapo.ranking.score import load_ranker
start, done = threading.Barrier(4), []
def load(work): start.wait(), eval(work), done.append(work)
threads = [threading.Thread(target=load, args=(work,)) for work in {2 * work}]
[one.start() for one in threads], [one.join() for one in threads]
assert len(done) == 4
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=120)


# --- best-of-n ----------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=6), st.data())
@settings(deadline=None, max_examples=60)
def test_best_of_n_is_the_mean_over_all_subsets(pairs: list[tuple[int, int]], data: st.DataObject) -> None:
    n = data.draw(st.integers(1, len(pairs)))
    worth = []
    for subset in combinations(pairs, n):
        top = [value for score, value in subset if score == max(s for s, _ in subset)]
        worth.append(np.mean(top))
    scores, values = zip(*pairs, strict=True)
    assert best_of(scores, values, n) == pytest.approx(np.mean(worth))


def test_best_of_n_leaves_failed_scores_out_and_more_samples_are_worth_more() -> None:
    rng = random.Random(0)
    several = [scored(*(rng.random() for _ in range(8))) for _ in range(50)]
    values = [[one.score or 0.0 for one in row] for row in several]
    found = best_of_n(several, values, [1, 2, 4, 8, 16])
    assert list(found) == [1, 2, 4, 8]
    assert found[1].value < found[2].value < found[4].value < found[8].value
    assert best_of_n([scored(None, 1.0, 2.0)], [[9, 0, 1]], [1, 2, 3])[2].value == 1
    with pytest.raises(DataError, match="no sample with a score"):
        best_of_n([scored(None)], [[1]], [1])


def test_agreement_and_the_pairs_to_ask_about() -> None:
    rows = [Candidates(f"p{k}", ("a", "b"), (1.0, 0.0)) for k in range(4)]
    found = [scored(2, 1), scored(0, 0), scored(1, 5), scored(3, 0.5)]
    told = agreement(rows, found)
    assert told["accuracy"].value == (1 + 0.5 + 0 + 1) / 4
    assert agreement([Candidates("p", ("a",), (1.0,))], [scored(1)]) == {}
    asked = least_sure([*rows, *rows], [*found, *found], 2)  # what is there twice is asked about once
    assert [one["prompt"] for one in asked] == ["p1", "p0"] and asked[1]["candidates"] == ["text 0", "text 1"]


@pytest.mark.parametrize(
    ("name", "text", "ranks"),
    [
        ("adapter_config.json", '{"task_type": "SEQ_CLS"}', True),
        ("adapter_config.json", '{"task_type": "CAUSAL_LM"}', False),
        ("config.json", '{"architectures": ["LlamaForSequenceClassification"]}', True),
        ("config.json", "[]", False),
    ],
)
def test_a_reward_model_is_known_by_its_files(name: str, text: str, ranks: bool, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert is_reward_model(str(tmp_path)) is ranks


def test_a_reference_that_could_not_be_loaded_is_loaded_when_asked_again(policy: Path, monkeypatch) -> None:
    scorer, loaded = load_ranker(policy), list[str]()

    def load(path: str, *how: object) -> torch.nn.Module:
        loaded.append(path)
        if len(loaded) == 2:
            raise ModelError("not there yet")
        return load_model(path, *how)

    monkeypatch.setattr("dapo.model.loading.load_model", load)
    with pytest.raises(ModelError, match="not there yet"):
        scorer._load()
    scorer._load()
    assert len(loaded) == 3 and loaded[1] == loaded[2] != loaded[0]
