"""The run folder: nothing overwritten, everything recorded, no secrets."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from dapo.config import Config, build_config, load_config
from dapo.config.composed_reward import REWARD_KINDS
from dapo.config.secrets import BLANK, redact, redact_command
from dapo.errors import UserError
from dapo.evaluation.votes import Shown, Vote, add_vote
from dapo.observe.index import forget_steps
from dapo.observe.run_folder import RunFolder


def make_config(folder: Path, **sections: Any) -> Config:
    run = {"dir": str(folder), **sections.pop("run", {})}
    return build_config({"model": {"path": "m"}, "run": run, **sections})


def test_a_new_folder_holds_config_and_environment(tmp_path: Path) -> None:
    config = make_config(tmp_path / "a" / "b", seed=5)
    folder = RunFolder.create(config, command=["dapo", "train", "r.yaml"])
    assert load_config(folder.config) == config
    environment = json.loads(folder.environment.read_text())
    assert environment["command"] == ["dapo", "train", "r.yaml"]
    assert environment["dapo"] and environment["python"] and environment["packages"]["torch"]
    assert environment["started"][:2] == "20"
    assert folder.samples.is_dir() and folder.checkpoints.is_dir()
    assert not folder.model_before.exists() and not folder.summary.exists()


def test_summary_is_json(tmp_path: Path) -> None:
    folder = RunFolder.create(make_config(tmp_path / "r"))
    folder.write_summary({"accuracy_after": 0.5, "nan": float("nan")})
    assert json.loads(folder.summary.read_text()) == {"accuracy_after": 0.5, "nan": None}


def test_a_summary_that_cannot_be_written_is_said_with_its_file(tmp_path: Path) -> None:
    folder = RunFolder.create(make_config(tmp_path / "r"))
    folder.summary.mkdir()
    with pytest.raises(UserError, match=r"summary\.json: cannot be written"):
        folder.write_summary({})


def test_an_existing_folder_is_refused_with_two_ways_out(tmp_path: Path) -> None:
    config = make_config(tmp_path / "r")
    RunFolder.create(config)
    (tmp_path / "r" / "summary.json").write_text("precious")
    with pytest.raises(UserError, match=r"the folder .*/r exists; set run\.dir .* or run\.if_exists=rename"):
        RunFolder.create(config)
    assert (tmp_path / "r" / "summary.json").read_text() == "precious"


def test_rename_keeps_every_old_run(tmp_path: Path) -> None:
    config = make_config(tmp_path / "r", run={"if_exists": "rename"})
    said: list[str] = []
    for number in range(4):
        folder = RunFolder.create(config, tell=said.append)
        folder.write_summary({"number": number})
        os.utime(folder.config, (1_700_000_000, 1_700_000_000))  # all in the same second
    runs = {p.name: json.loads((p / "summary.json").read_text())["number"] for p in tmp_path.iterdir()}
    assert sorted(runs.values()) == [0, 1, 2, 3]
    assert runs["r"] == 3
    assert all(re.fullmatch(r"r(-\d{8}-\d{6}(-\d)?)?", name) for name in runs)
    assert sorted(said) == sorted(f"the earlier run is now in {tmp_path / name}" for name in runs if name != "r")


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    assert RunFolder.create(make_config(tmp_path / "r")).config.is_file()


@pytest.mark.parametrize("if_exists", ["fail", "rename"])
def test_a_folder_that_is_no_run_is_never_moved(tmp_path: Path, if_exists: str) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match=r"run\.dir: .*set run\.dir"):
        RunFolder.create(make_config(tmp_path / "r", run={"if_exists": if_exists}))
    assert (tmp_path / "r" / "thesis.tex").read_text() == "mine"


def test_the_working_folder_is_never_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="not renamed"):
        RunFolder.create(make_config(tmp_path, run={"if_exists": "rename"}))


@pytest.mark.parametrize("name", ["file", "file/below", "x" * 300, "a\0b"])
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"run\.dir: (.*set run\.dir to another|is too long for a name)"):
        RunFolder.create(make_config(tmp_path / name))


# --- secrets (failure 79) -----------------------------------------------------------------------------------------


def test_secrets_reach_no_file(tmp_path: Path) -> None:
    secrets = ["sk-one", "sk-two", "sk-three", "sk-four", "sk-five"]
    args = {
        "api_key": "sk-one",
        "headers": {"Authorization": "Bearer sk-two", "X-Token": "sk-three"},
        "url": "http://user:sk-four@judge.local/score",
        "tokenizer": "kept",
    }
    config = make_config(tmp_path / "r", reward={"kind": "function", "function": "f.py:score", "args": args})
    command = ["dapo", "train", "r.yaml", "reward.args.api_key=sk-one", "reward.args={password: sk-five}"]
    folder = RunFolder.create(config, command=command)
    written = "".join(p.read_text() for p in folder.root.rglob("*") if p.is_file())
    assert not [secret for secret in secrets if secret in written]
    assert BLANK in written and "kept" in written and "judge.local" in written


def test_only_secrets_are_blanked() -> None:
    config = make_config(Path("r"), rollout={"stop_token_ids": [1, 2]}, model={"path": "m", "tokenizer": "t"})
    tree = config.model_dump(mode="json")
    assert redact(tree) == tree
    assert redact({"token": 5, "auth": {"user": "u"}, "tokens": 5, "use_auth": True, "secret": None}) == {
        "token": BLANK,
        "auth": {"user": BLANK},
        "tokens": 5,
        "use_auth": True,
        "secret": None,
    }
    words = ["dapo", "train", "a b.yaml", "training.steps=3", "algorithm.kl={mode: loss}", "--debug"]
    assert redact_command(words) == words


@pytest.mark.parametrize(
    "key",
    [
        "X-API-Key",
        "api-key",
        "apiKey",
        "api_keys",
        "bearerToken",
        "accessKeyId",
        "aws_access_key_id",
        "OPENAI_KEY",
        "pwd",
    ],
)
def test_secret_keys_of_every_spelling_are_blanked(key: str) -> None:
    assert redact({key: "s3cret"}) == {key: BLANK}


def test_secrets_inside_of_values_are_blanked_and_ordinary_keys_are_not() -> None:
    shown = str(redact({"url": "https://x/?api_key=s3cret&n=1", "headers": ["Authorization: Bearer s3cret"]}))
    assert "s3cret" not in shown and "n=1" in shown
    ordinary = {"prompt_key": "question", "answer_key": "gold", "max_tokens": 5, "stop_token_ids": [1]}
    assert redact(ordinary) == ordinary


@pytest.mark.parametrize(
    "override",
    [
        "reward.args=api: SEKRET",
        "reward.args={pwd: SEKRET}",
        "reward.args.anything=SEKRET",
        "reward={kind: function, function: f.py:g, args: {pass: SEKRET}}",
        "reward.parts.a.reward.args.foo=SEKRET",
        "reward.parts={a: {reward: {kind: function, args: {foo: SEKRET}}}}",
    ],
)
def test_what_a_reward_is_given_is_not_in_the_recorded_command(override: str) -> None:
    assert "SEKRET" not in str(redact_command(["dapo", "train", "r.yaml", override]))


def test_secrets_of_further_spellings_are_blanked() -> None:
    tree = {"headers": ["X-Api-Key: SEKRET"], "OPENAI_KEY_2": "SEKRET", "url": "https://x.y/z?sig=SEKRET"}
    assert "SEKRET" not in str(redact(tree)) and "x.y" in str(redact(tree))


SPELLED = (
    "creds", "pat", "jwt", "passwd", "auth", "bearer", "private_key", "PRIVATE_KEY_PEM", "cookie", "session",
    "api_tokens", "hmac", "secret_id", "pin", "otp",
    "sessionId", "pass", "db_pass", "signature", "private", "openaikey", "auth_header", "githubPAT",
)  # fmt: skip
ORDINARY = (
    "tokens_per_micro_batch", "max_tokens", "pattern", "path", "author", "monkey", "turkey", "compass", "keyword",
    "eos_token", "cost_per_token", "session_length", "key_dim", "significance", "authority", "token_level", "passes",
)  # fmt: skip
VALUES = (
    "hf_SEKRET10AAA", "sk-SEKRET9AAA", "sk-proj-SEKRET9AAA", "sk_live_SEKRET9A", "ghp_SEKRET13AAA", "gho_SEKRET13AAA",
    "github_pat_11SEKRET0", "glpat-SEKRET-x1", "xoxb-12-SEKRET", "xoxp-12-SEKRET", "AKIASEKRETSEKRET7",
    "AIzaSySEKRET1234567890", "eyJSEKRETGciOi.eyJSEKRET.SEKRET", "-----BEGIN RSA PRIVATE KEY-----\nSEKRET\nSEKRET\n",
    "Bearer SEKRET1", "Basic SEKRETdXNlcg==", "postgres://u:SEKRET@h/db", "api_key=SEKRET1", "--token=SEKRET1",
    "https://h/x?X-Amz-Signature=SEKRET&n=1", "Protocol=https;AccountKey=SEKRETabc==;", "Server=x;Password=SEKRET;",
    '{"n": 1, "api_key": "SEKRET1"}', '{\\"api_key\\": \\"SEKRET1\\"}', "curl -H 'X-Api-Key: SEKRET1' h",
    "f --token SEKRET1",
    "-----BEGIN PGP PRIVATE KEY BLOCK-----\nSEKRET\n-----END PGP PRIVATE KEY BLOCK-----", 'password="SEKRET SEKRET"',
    "https://hooks.slack.com/services/T0/B0/SEKRET", "SG.SEKRET45abcdefABC123.SEKRET", "r8_SEKRET38abcdefABC123",
    "tgp_v1_SEKRET2abcdefABC123", "dop_v1_9SEKRET0123456789abcdef", "pplx-SEKRET49abcdefABC12",
    "xai-SEKRET50abcdefABC12",
    "pcsk_SEKRET48abcdefABC123_abc", "shpat_SEKRET0123456789abcdef", "amqp://u:p@SEKRET@h/v",
)  # fmt: skip
WORDS = (
    "sk-learn-model", "hf_transfer", "Basic algebra", "the bearer of bad news", "give it as key=value",
    "task-based-learning-2020-2021",
    "pplx-70b-chat", '{"key": "answer"}', "f --tokenizer x", "token=<think>",
    "/models/hf_Qwen3-8B", "runs/sk-Baseline1", "Give the pair as key=Value.",
    "max_tokens=500", "Answer key: 42", "x=1, y=2", "https://h/x?n=1&page=2",
)  # fmt: skip


def test_secrets_are_known_by_their_key_and_by_their_look() -> None:
    assert [key for key in (*SPELLED, "storagekey", "hfkey") if redact({key: "s3cret"}) != {key: BLANK}] == []
    assert [key for key in ORDINARY if redact({key: "s3cret"}) != {key: "s3cret"}] == []
    for value in VALUES:
        for shown in (redact(f"401: {value} is wrong"), redact({"note": [{"x": value}]}), redact({value: 1})):
            assert "SEKRET" not in str(shown) and BLANK in str(shown), value
        assert "SEKRET" not in str(redact_command(["dapo", "train", f"data.system={value}"])), value
    assert [text for text in WORDS if redact(text) != text] == []
    for lower in ("hf_abcdefghijklmnopqrstuvwxyzabcdefgh", "token=abcdefghijklmnopqrst"):
        assert "abcdefgh" not in redact(lower)
    flags = ["f", "--api-key", "SEKRET", "--n", "1"]
    assert redact({"args": flags})["args"] == redact_command(flags) == ["f", "--api-key", BLANK, "--n", "1"]


def test_what_is_no_secret_under_a_key_that_may_hold_one_is_recorded() -> None:
    args = {
        "key": "answer",
        "sort_key": "name",
        "primary_key": "id",
        "signature": "f(x)",
        "token": "<think>",
        "sig": 0.5,
    }
    args |= {"pat": r"\d+", "separator_token": "|", "keys": ["a", "final_answer"]}
    assert redact(args) == args
    assert redact({"key": "answer1x", "keys": [987651234], "api_key": "answer"}) == {
        "key": BLANK,
        "keys": [BLANK],
        "api_key": BLANK,
    }


def test_what_looks_for_secrets_takes_time_in_proportion_to_the_text() -> None:
    begun = time.process_time()
    for part in (
        "a",
        "a.",
        "://",
        "-----BEGIN ",
        "a=1",
        "-",
        "sk-",
        "Bearer ",
        "hf_a",
        "eyJ.",
        "key:",
        "'key:",
        "--key ",
        'key="',
        "SG.a",
    ):
        redact(part * (200_000 // len(part)))
    assert time.process_time() - begun < 20  # a quadratic pattern takes minutes


def test_no_default_of_any_reward_is_taken_for_a_secret():
    required = {
        "function": "a:b",
        "path": "p",
        "url": "http://127.0.0.1",
        "model": "m",
        "parts": {"a": {"reward": {"kind": "math"}}},
    }
    for kind, section in REWARD_KINDS.items():
        given = {key: value for key, value in required.items() if key in section.model_fields and kind != "code"}
        values = section.model_validate({"kind": kind, **given}).model_dump(mode="json")
        assert redact(values) == values, kind


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EBADF, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told_of_and_not_taken_for_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    said: list[str] = []
    with RunFolder(tmp_path).lock(said.append):
        pass
    assert len(said) == 1 and f"no locks ({os.strerror(code)})" in said[0] and str(tmp_path) in said[0]
    answers = (Shown("model-before", "3"), Shown("model-after", "4"))
    add_vote(tmp_path, Vote("2+2=", *answers, "right", "ann", 0.0))
    (tmp_path / "index").mkdir()
    forget_steps(tmp_path, after=0)


def test_a_lock_that_is_held_is_held(tmp_path: Path) -> None:
    said: list[str] = []
    with (
        RunFolder(tmp_path).lock(said.append),
        pytest.raises(UserError, match="another process"),
        RunFolder(tmp_path).lock(said.append),
    ):
        pass
    assert said == []
