"""The page's server, asked over HTTP: who may, what it answers, what is new."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import pkgutil
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from typer.testing import CliRunner

from dapo.commands import app as program
from dapo.commands.ui.serving import PORTS, address_of, beside, token_for
from dapo.config import ExactReward, TrainingConfig
from dapo.config.plan import UNBOUNDED
from dapo.errors import UserError
from dapo.observe.changes import Change
from dapo.observe.metrics import MetricsLog
from dapo.observe.run_view import RunView
from dapo.observe.samples import write_samples
from dapo.util.files import lock_file
from dapo.util.serving import listening_socket
from page_run import RIGHT, SCRIPT, add_step, made_group, page_run, served

pytest.importorskip("duckdb")
pytest.importorskip("uvicorn")

HUGE = 10**200
VIEWS = (
    "runs", "metrics?run=r", "curves?run=r&metric=accuracy", "ablation?run=r", "config?run=r", "groups?run=r",
    "group?run=r&step=1&draw=10", "sample?run=r&step=1&draw=10&sample=1", "sampling?run=r", "hacking?run=r",
    "time?run=r", "time?run=r&step=2", "alarms?run=r", "evaluation?run=r", "search?run=r&text=what",
)  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("runs")
    page_run(root / "r")
    page_run(root / "other", settings={"training.steps": 7, "seed": 3})
    with served(root) as address:
        yield address


def get(address: str, headers: dict[str, str] | None = None) -> tuple[int, Any, http.client.HTTPMessage]:
    request = urllib.request.Request(address, headers=headers or {})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            body, status, found = answer.read(), answer.status, answer.headers
    except HTTPError as error:
        body, status, found = error.read(), error.code, error.headers
    return status, json.loads(body) if "json" in found.get("Content-Type", "") else body, found


def raw(address: str, target: str, headers: dict[str, str], method: str = "GET") -> tuple[int, dict[str, str]]:
    """A request with exactly these headers, whose redirection is not followed."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)
    connection.request(method, target, headers=headers)
    answer = connection.getresponse()
    answer.read()
    return answer.status, dict(answer.headers)


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_is_answered(page: str, view: str) -> None:
    status, found, _ = get(f"{page}/api/{view}")
    assert status == 200 and found


def test_the_list_names_runs_and_how_far_they_are(page: str) -> None:
    found = {run["name"]: run for run in get(f"{page}/api/runs")[1]}
    assert set(found) == {"r", "other"}
    assert (found["r"]["steps"], found["r"]["planned"], found["other"]["planned"]) == (2, 9, 7)


def test_a_group_holds_texts_as_they_are(page: str) -> None:
    _, found, headers = get(f"{page}/api/group?run=r&step=1&draw=10")
    assert found["samples"][0]["response"] == SCRIPT and headers["Content-Type"] == "application/json"
    assert found["samples"][0]["tokens"]["pieces"] == list("1+2=3")
    assert (found["prompt"], found["why"]) == ("what is 10?", "trained on")


def test_runs_are_set_against_what_is_different_in_them(page: str) -> None:
    found = get(f"{page}/api/ablation?run=r&run=other")[1]
    assert found["keys"] == ["seed", "training.steps"]
    assert [row["config"]["training.steps"] for row in found["rows"]] == [9, 7]


def test_each_key_has_the_default_of_the_config_tree_and_of_its_kind(page: str) -> None:
    found = get(f"{page}/api/config?run=r&run=other")[1]
    mine, other = found["defaults"]
    changed = [key for key, (value, _) in found["values"].items() if key not in mine or mine[key] != value]
    assert changed == ["model.path", "reward.kind", "training.steps", "run.dir"]
    assert "model.path" not in mine  # it must be given
    assert mine == other == mine | {"seed": 0, "reward.kind": "math", "reward.after": ExactReward(kind="exact").after}
    assert mine["training.steps"] == TrainingConfig().steps and mine["data.train"] == []


@pytest.mark.parametrize(
    "recipe",
    [
        "reward: {kind: exact}\nmodel: {path: m}\n",
        "stage: sft\nmodel: {path: m}\ndata: {train: a.jsonl}\nrun: {dir: r}\n",
    ],
)
def test_alarms_and_defaults_are_told_of_runs_and_stages(tmp_path: Path, recipe: str) -> None:
    folder = page_run(tmp_path / "r", steps=0)
    folder.config.write_text(recipe)
    with MetricsLog(folder.metrics) as log:
        for step in range(1, 10):
            log.append(step, {"lr": 0.0 if step > 4 else 1e-3, "reward/errors": 0.0})
    with served(tmp_path) as address:
        told = get(f"{address}/api/alarms?run=r")[1]
        assert get(f"{address}/api/config?run=r")[1]["defaults"][0]["training.weight_decay"] is not None
    by_name = {alarm["name"]: alarm for alarm in told["alarms"]}
    first = by_name.pop("zero learning")
    assert told["readable"] and first["steps"] == [7, 8, 9]  # once three steps in a row were 0
    assert "learning rate is 0" in first["seen"] and first["advice"]
    assert not any(alarm["steps"] for alarm in by_name.values())


def test_the_defaults_of_another_version_are_not_known(tmp_path: Path) -> None:
    page_run(tmp_path / "r").config.write_text("of: another version\n")
    with served(tmp_path) as address:
        assert get(f"{address}/api/config?run=r")[1] == {
            "values": {"of": ["another version"]}, "differing": [], "defaults": [None]
        }  # fmt: skip
        assert get(f"{address}/api/alarms?run=r")[1]["readable"] is False


def test_runs_with_other_seeds_are_told_and_drawn_as_one(tmp_path: Path) -> None:
    for name, settings in {"a": {"seed": 1}, "b": {"seed": 2}, "c": {"training.steps": 7}, "d": {"seed": 1}}.items():
        page_run(tmp_path / name, steps=3 if name == "b" else 2, settings=settings)
    with served(tmp_path) as address:
        again = get(f"{address}/api/metrics?run=a&run=d")[1]  # one seed twice is no second seed
        assert again["experiments"] == [["a"], ["d"]]
        names = "run=a&run=c&run=b"
        found = get(f"{address}/api/metrics?{names}")[1]
        assert found["experiments"] == [["a", "b"], ["c"]] and found["seeds"] == {"a": 1, "b": 2, "c": 0}
        together = get(f"{address}/api/curves?{names}&metric=accuracy&together=true")[1]
        assert {name: len(one["accuracy"]) for name, one in together.items()} == {"a": 2, "c": 2}
        assert list(get(f"{address}/api/curves?{names}&metric=accuracy")[1]) == ["a", "c", "b"]


def test_time_left_is_told_of_a_run_that_goes_on_and_the_end_of_an_earlier_part_is_not(tmp_path: Path) -> None:
    folder = page_run(tmp_path / "r")
    folder.write_summary({"steps": 2, "stopped": "all steps are done"})
    with served(tmp_path) as address:
        assert get(f"{address}/api/runs")[1][0]["left"] is None
        assert get(f"{address}/api/evaluation?run=r")[1]["stopped"] == "all steps are done"
        with (folder.root / ".lock").open("w") as lock:
            assert lock_file(lock, fcntl.LOCK_EX) is None
            left = get(f"{address}/api/runs")[1][0]["left"]
            assert (left["steps"], left["pace"], left["seconds"]) == (7, 3.0, 21.0) and left["since"] >= 0
            assert get(f"{address}/api/evaluation?run=r")[1]["stopped"] is None


def test_of_a_run_that_a_budget_ends_the_page_tells_the_budget(tmp_path: Path) -> None:
    """As many steps as fit into the minutes; of tokens nobody knows."""
    for name, budget in (("minutes", 10), ("tokens", 10**6)):
        folder = page_run(tmp_path / name, settings={"training.steps": UNBOUNDED, f"training.{name}": budget})
        with MetricsLog(folder.metrics) as log:
            log.append(3, {"time/step": 3.0, "time/training": 570.0})
    with served(tmp_path) as address, ExitStack() as stack:
        for name in ("minutes", "tokens"):
            lock_file(stack.enter_context((tmp_path / name / ".lock").open("w")), fcntl.LOCK_EX)
        found = {run["name"]: run for run in get(f"{address}/api/runs")[1]}
    assert [found[name]["planned"] for name in found] == [None, None]
    assert (found["minutes"]["budget"], found["tokens"]["budget"]) == ("10 minutes", "1,000,000 tokens")
    assert (found["minutes"]["left"]["steps"], found["tokens"]["left"]) == (10, None)


def test_what_was_passed_from_python_is_said_in_place_of_the_recipe(tmp_path: Path) -> None:
    folder = page_run(tmp_path / "r")
    started_from = {"reward": {"kind": "python", "function": "my_reward"}, "data.train": {"rows": 5, "hash": "x"}}
    folder.fingerprint.write_text(json.dumps(started_from))
    with served(tmp_path) as address:
        values = get(f"{address}/api/config?run=r")[1]["values"]
    assert values["reward"] == ["a Python function: my_reward"] and "reward.kind" not in values
    assert values["data.train"] == ["rows passed from Python"] and values["evaluation.data"] == [[]]


def test_page_and_report_count_the_same_groups_in_the_same_words(tmp_path: Path) -> None:
    folder = page_run(tmp_path / "r", steps=1)
    with MetricsLog(folder.metrics) as log:
        log.append(2, {"groups/drawn": 5, "groups/kept": 2, "groups/unscored": 1, "groups/cancelled": 2})
    with served(tmp_path) as address:
        found = get(f"{address}/api/sampling?run=r")[1]
    rows = {row["status"]: (row["groups"], row["samples"]) for row in found["statuses"]}
    assert rows["kept"] == (3, 2) and rows["cancelled"] == (2, None) and rows["too_few_scored"] == (1, None)
    assert found["drawn"] == sum(groups for groups, _ in rows.values()) == 8
    outcomes = RunView.read(folder.root).outcomes  # what the report shows
    assert outcomes == {status: groups for status, (groups, _) in rows.items()}


def test_a_sign_of_reward_hacking_is_named(tmp_path: Path) -> None:
    folder = page_run(tmp_path / "r", steps=1)
    with MetricsLog(folder.metrics) as log:
        log.append(2, {"monitor/alarms": 1.0, "monitor/alarms/length": 1.0, "monitor/alarms/divergence": 0.0})
    with served(tmp_path) as address:
        on = {alarm["name"]: alarm["steps"] for alarm in get(f"{address}/api/alarms?run=r")[1]["alarms"]}
    assert on["reward and length"] == [2]
    assert "reward hacking: divergence" not in on and "clipping" not in on  # nothing there to watch is not calm


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("api/alarms?run=none", 404),
        ("api/alarms?run=../../etc", 404),
        ("api/group?run=r&step=1&draw=999", 404),
        ("api/sample?run=r&step=1&draw=10&sample=9", 404),
        (f"api/group?run=r&step=1&draw={HUGE}", 422),
        (f"api/group?run=r&step={HUGE}&draw=10", 422),
        (f"api/group?run=r&step=1&draw={2**63 - 1}", 404),
        (f"api/sample?run=r&step=1&draw=10&sample={HUGE}", 422),
        (f"api/groups?run=r&row={HUGE}", 422),
        (f"api/groups?run=r&longer_than={HUGE}", 422),
        ("api/groups?run=r&limit=100000", 422),
        ("api/groups?run=r&order=1%3B%20DROP", 422),
        ("api/curves?run=r&metric=a&points=1", 422),
        ("api/search?run=r&text=", 422),
        (f"api/search?run=r&text={'a' * 300}", 422),
        (f"api/search?run=r&text=a&step={HUGE}", 422),
        ("static/../server.py", 404),
        ("static/%2e%2e/server.py", 404),
        ("nothing", 404),
    ],
)
def test_what_is_not_there_is_refused(page: str, target: str, status: int) -> None:
    assert raw(page, f"/{target}", {"Host": "localhost"})[0] == status


def test_what_is_malformed_is_told_whatever_was_sent(page: str) -> None:
    assert "draw: " in get(f"{page}/api/group?run=r&step=1&draw=x")[1]["error"]
    body = b'{"run": "r", "models": ["a", "b"], "temperature": Infinity}'  # no JSON, which Python reads
    request = urllib.request.Request(f"{page}/api/playground", body, {"Content-Type": "application/json"})
    with pytest.raises(HTTPError) as error:
        urllib.request.urlopen(request, timeout=30)
    assert error.value.code == 422 and "temperature: " in json.loads(error.value.read())["error"]


def test_a_fault_of_ours_is_not_told_as_something_missing(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*_: object) -> None:
        raise KeyError("draw")

    monkeypatch.setattr("dapo.commands.ui.queries.group", faulty)
    assert get(f"{page}/api/group?run=r&step=1&draw=10")[0] == 500


def test_of_a_large_group_there_are_beginnings_and_each_sample_by_itself(
    page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dapo.commands.ui.samples.MOST_TOKENS", 4)
    monkeypatch.setattr("dapo.commands.ui.samples.BEGINNING", 8)
    found = get(f"{page}/api/group?run=r&step=1&draw=10")[1]
    first = found["samples"][0]
    assert not found["whole"] and (first["response"], first["tokens"]) == ("<script> …", {}) and first["length"] == 5
    whole = get(f"{page}/api/sample?run=r&step=1&draw=10&sample=0")[1]
    assert whole["response"] == SCRIPT and whole["tokens"]["pieces"] == list("1+2=")


def test_texts_that_are_gone_leave_the_numbers(tmp_path: Path) -> None:
    folder = page_run(tmp_path / "r", steps=1)
    with served(tmp_path) as address:
        assert get(f"{address}/api/groups?run=r")[1]["groups"][0]["prompt"] == "what is 10?"
        (folder.samples / "step-00001.safetensors").unlink()
        found = get(f"{address}/api/group?run=r&step=1&draw=10")[1]
        assert found["samples"][0]["reward"] == 1.0 and found["samples"][0]["tokens"] == {}


@pytest.mark.parametrize(
    ("view", "reader"),
    [
        ("time?run=r", "dapo.commands.ui.queries.resources"),  # a file is gone that was there just before
        ("groups?run=r", "dapo.commands.ui.queries.groups"),
        ("metrics?run=r&run=other", "dapo.commands.ui.runs.RunView.read"),  # the folder itself
    ],
)
def test_a_run_that_is_removed_while_it_is_read_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, view: str, reader: str
) -> None:
    folder = page_run(tmp_path / "r")
    page_run(tmp_path / "other")
    folder.resources.write_text("{}\n")
    read = pkgutil.resolve_name(reader)

    def removed_first(*args: Any) -> Any:
        shutil.rmtree(folder.root, ignore_errors=True)
        if reader.endswith("groups"):
            raise FileNotFoundError(folder.samples)
        return read(*args)

    with served(tmp_path) as address:
        monkeypatch.setattr(reader, removed_first)
        assert get(f"{address}/api/{view}")[:2] == (404, {"error": "there is no run 'r' here: it was just removed"})
        assert get(f"{address}/api/{view}")[:2] == (404, {"error": "there is no run 'r' here"})


def test_no_other_run_is_hidden_by_one_that_is_removed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = page_run(tmp_path / "r").root
    page_run(tmp_path / "other")
    read = RunView.read

    def removed_first(root: Path, *how: Any) -> RunView:
        if root == removed:
            raise FileNotFoundError(root)
        return read(root, *how)

    with served(tmp_path) as address:
        monkeypatch.setattr("dapo.commands.ui.runs.RunView.read", removed_first)
        marks = get(f"{address}/api/changes?run=r&run=other")[1]["of"]
        assert marks["r"] == {} and marks["other"]["state"] == "killed"


def test_a_spoilt_line_is_told_and_the_other_runs_are_there(tmp_path: Path) -> None:
    page_run(tmp_path / "good")
    page_run(tmp_path / "odd").summary.write_text('{"steps": null}')
    page_run(tmp_path / "bad").metrics.write_text("no JSON\n")
    with served(tmp_path) as address:
        states = {run["name"]: run["state"] for run in get(f"{address}/api/runs")[1]}
        assert states == {"bad": "unreadable", "good": "killed", "odd": "killed"}
        status, found, _ = get(f"{address}/api/alarms?run=bad")
        assert status == 422 and "metrics.jsonl:1: not a line of metrics" in found["error"]


def test_what_cannot_be_sent_or_read_hides_no_group(tmp_path: Path) -> None:
    folder = page_run(tmp_path / "r")
    write_samples(folder.samples, 3, [(made_group(30, [RIGHT], ["lone \ud800"]), "kept")])
    (folder.model_before / "tokenizer.json").write_text("{")  # the disk was full when it was saved
    with served(tmp_path) as address:
        assert get(f"{address}/api/groups?run=r")[1]["total"] == 7
        status, found, _ = get(f"{address}/api/group?run=r&step=3&draw=30")
        assert status == 200 and found["samples"][0]["response"] == "lone ?"
        assert found["samples"][0]["tokens"]["pieces"] is None


# --- who may -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["/", "/static/app.js", "/api/runs", "/api/alarms?run=none", "/nothing"])
def test_every_answer_allows_scripts_and_styles_of_its_own_only(page: str, target: str) -> None:
    headers = get(page + target)[2]
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy and "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_without_a_token_only_this_machine_is_known_by_name(page: str) -> None:
    assert raw(page, "/api/runs", {"Host": "localhost:80"})[0] == 200
    assert raw(page, "/api/runs", {"Host": "[::1]:80"})[0] == 200
    for foreign in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80"):
        assert raw(page, "/api/runs", {"Host": foreign})[0] == 403


def test_changes_are_taken_from_the_page_itself_only(page: str) -> None:
    host = page.removeprefix("http://")
    assert raw(page, "/api/runs", {"Origin": "http://evil.example"}, "POST")[0] == 403
    assert raw(page, "/api/runs", {"Origin": "null"}, "POST")[0] == 403
    assert raw(page, "/api/runs", {"Origin": "http://["}, "POST")[0] == 403
    assert raw(page, "/api/runs", {"Origin": f"http://{host}"}, "POST")[0] == 405  # nothing here can be changed


def test_a_token_opens_the_page_and_nothing_else_does(tmp_path: Path) -> None:
    page_run(tmp_path / "r")
    with served(tmp_path, token="right-ünd-long") as address:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": "dapo_token=wrong"}):
            for target in ("/", "/static/app.js", "/api/runs", "/api/changes?run=r"):
                assert raw(address, target, headers)[0] == 401
        assert raw(address, "/?token=wrong", {})[0] == 401


def test_the_token_of_the_address_becomes_a_cookie(tmp_path: Path) -> None:
    page_run(tmp_path / "r")
    with served(tmp_path, token="secret") as address:
        status, headers = raw(address, "/?token=secret&x=1", {"Host": "any.name"})
        assert status == 303 and headers["location"] == "/?x=1"
        cookie = headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie
        assert raw(address, "/api/runs", {"Cookie": cookie.partition(";")[0]})[0] == 200
        assert raw(address, "/api/runs", {"Authorization": "Bearer secret"})[0] == 200
        assert raw(address, "//evil.example/?token=secret", {})[1].get("location") == "/evil.example/"


def test_a_token_may_hold_any_letters(tmp_path: Path) -> None:
    token = 'a+b&c=%41 ;"漢'
    with served(tmp_path, token=token) as address, listening_socket("127.0.0.1", [0]) as other:
        status, headers = raw(address, "/?" + address_of(other, token).partition("?")[2], {})
        assert status == 303
        assert raw(address, "/api/runs", {"Cookie": headers["set-cookie"].partition(";")[0]})[0] == 200


def test_a_token_is_made_where_others_can_reach_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAPO_UI_TOKEN", raising=False)
    assert token_for("127.0.0.1", None) is None and token_for("localhost", None) is None
    assert token_for("127.0.0.1", "mine") == "mine"
    made = {token_for("0.0.0.0", None) for _ in range(3)}
    assert len(made) == 3 and all(token and len(token) >= 24 for token in made)
    monkeypatch.setenv("DAPO_UI_TOKEN", " theirs ")
    assert token_for("127.0.0.1", None) == token_for("0.0.0.0", None) == "theirs"
    assert token_for("127.0.0.1", "mine") == "mine"


# --- what is new ---------------------------------------------------------------------------------------------------


def test_what_has_changed_shows_by_run(tmp_path: Path) -> None:
    folder = page_run(tmp_path / "r", steps=1)
    page_run(tmp_path / "other", steps=1)
    with served(tmp_path) as address:
        asked = f"{address}/api/changes?run=r&run=other&run=none"
        before = get(asked)[1]
        assert before["runs"] == ["other", "r"] and before["of"].keys() == {"other", "r"} and get(asked)[1] == before
        add_step(folder, 2)
        after = get(asked)[1]
        assert [name for name in after["of"]["r"] if after["of"]["r"][name] != before["of"]["r"][name]] == [
            *("metrics", "samples")
        ]
        assert after["of"]["other"] == before["of"]["other"]
        assert get(f"{address}/api/curves?run=r&metric=accuracy")[1]["r"]["accuracy"][-1][:2] == [2, 0.2]


# --- the process ---------------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_left_for_the_next_one() -> None:
    first, second = listening_socket("127.0.0.1", [0]), None
    taken = first.getsockname()[1]
    try:
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1, port {taken}.*--port 0"):
            listening_socket("127.0.0.1", [taken])
        second = listening_socket("127.0.0.1", PORTS)
        assert address_of(second, "t").endswith("/?token=t")
    finally:
        first.close()
        if second:
            second.close()


@pytest.mark.parametrize("host", ["a..b", "x" * 70])
def test_a_host_that_cannot_be_is_an_error_for_people(host: str) -> None:
    with pytest.raises(UserError, match=f"--host {host}: not an address"):
        listening_socket(host, [0])


def test_beside_a_training_the_page_lasts_as_long_as_it(tmp_path: Path) -> None:
    said: list[str] = []
    with beside(tmp_path / "runs" / "r", said.append):
        address = said[0].rpartition(" ")[2].rstrip("/")
        assert get(f"{address}/api/runs")[1] == []  # the run has not begun
        page_run(tmp_path / "runs" / "r")
        assert [run["name"] for run in get(f"{address}/api/runs")[1]] == ["r"]
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=5)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, -signal.SIGTERM)])
def test_the_command_serves_until_it_is_told_to_stop(tmp_path: Path, number: signal.Signals, code: int) -> None:
    page_run(tmp_path / "r")
    command = [sys.executable, "-m", "dapo", "ui", str(tmp_path), "--port", "0", "--no-browser", "--quiet"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=dict(os.environ), **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout is not None and process.stderr is not None
        address = process.stdout.readline().strip().rstrip("/")
        assert [run["name"] for run in get(f"{address}/api/runs")[1]] == ["r"]
        process.send_signal(number)
        assert (process.wait(timeout=20), process.stderr.read()) == (code, "")


def test_a_token_never_stands_in_the_command_line_of_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page_run(tmp_path / "r", steps=0)
    opened_at: list[str] = []
    monkeypatch.delenv("DAPO_UI_TOKEN", raising=False)
    monkeypatch.setattr("dapo.commands.ui.serving.open_browser", opened_at.append)
    monkeypatch.setattr("dapo.commands.ui.serving.serve", lambda folders, listening, token: listening.close())
    for option in ((), ("--token", "secret"), ("--host", "0.0.0.0")):
        done = CliRunner().invoke(program, ["ui", str(tmp_path), "--port", "0", *option])
        assert done.exit_code == 0 and ("?token=" in done.output) == bool(option)
    assert len(opened_at) == 1 and "token" not in opened_at[0]


def test_a_folder_that_is_no_run_is_an_error_for_people(tmp_path: Path) -> None:
    done = CliRunner().invoke(program, ["ui", str(tmp_path), "--no-browser"])
    assert done.exit_code == 1 and "neither is a run folder nor holds any" in done.output


def test_a_run_folder_that_is_a_bomb_says_so_and_the_others_are_shown(tmp_path: Path) -> None:
    lines = ["a: &a [lol]"] + [f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]" for a, b in pairwise("abcdefghijk")]
    bombs = {"laughs/config.yaml": "\n".join(lines), "deep/config.yaml": "a: " + "[" * 10_000}
    bombs |= {"large/config.yaml": "a: 1\n" * 2**22}
    bombs |= {"line/metrics.jsonl": '{"step": 1, "x": "' + "x" * 2**21 + '"}\n'}
    bombs |= {"nested/metrics.jsonl": '{"step": 1, "x": ' + "[" * 200_000 + "]" * 200_000 + "}\n"}
    bombs |= {"summary/summary.json": '{"a":' * 200_000 + "1" + "}" * 200_000}
    page_run(tmp_path / "good")
    for place, text in bombs.items():
        page_run(tmp_path / place.partition("/")[0], steps=0)
        (tmp_path / place).write_text(text)
    with served(tmp_path) as address:
        found = {run["name"]: run for run in get(f"{address}/api/runs")[1]}
    assert found.keys() == {"good", "laughs", "deep", "line", "nested", "summary", "large"}
    unreadable = {name for name, run in found.items() if run["state"] == "unreadable"}
    assert unreadable == {"laughs", "deep", "line", "nested", "large"}
    assert "larger than 16.0 MiB" in found["large"]["status"]
    assert "too large" in found["laughs"]["status"] and "nesting" in found["deep"]["status"]
    assert "line 1 is longer than 1.0 MiB" in found["line"]["status"]


def test_curves_say_where_settings_were_changed(tmp_path: Path) -> None:
    """On the axis that is asked for; of a step that is not done yet nothing."""
    folder = page_run(tmp_path / "r")
    changed = [
        Change(2, "training.learning_rate", 1e-6, 5e-7, "2026-01-02"),
        Change(2, "training.steps", 9, 12, "2026-01-02"),
        Change(3, "algorithm.clip_ratio_high", 0.28, 0.2, "2026-01-03"),
    ]
    folder.fingerprint.write_text(json.dumps({"changes": [asdict(one) for one in changed]}))
    with served(tmp_path / "r") as address:
        for axis, place in (("step", 2), ("tokens", 200)):
            (mark,) = get(f"{address}/api/curves?run=r&metric=accuracy&x={axis}")[1]["r"]["changes"]
            lines = ["step 2: training.learning_rate 1e-06 -> 5e-07", "step 2: training.steps 9 -> 12"]
            assert mark == [place, "\n".join(lines)]
