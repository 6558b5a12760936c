"""A stored rollout step made again: exactly where nothing was changed, by name where something was."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_cases import change_lines, change_tokens, make_run, recipe

from dapo.commands.replay.recompute import reports_differ
from dapo.commands.replay.replay import Replay, replay
from dapo.commands.replay.stored import read_step
from dapo.errors import UserError
from dapo.observe.metrics import read_metrics
from dapo.observe.run_folder import RunFolder
from dapo.observe.sample_rows import rows_of
from dapo.observe.samples import TokenArrays, discard_samples, tokens_path, updates_path
from dapo.records import Sample
from dapo.training.trainer import Trainer
from run_cases import Recorder, run


def told(found: Replay) -> list[tuple[str, int | None, int | None]]:
    return [(one.what, one.draw, one.index) for one in found.differences]


def files(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in RunFolder(root).samples.glob("step-*")}


# --- nothing was changed ------------------------------------------------------------------------------------------


def test_the_first_step_comes_out_to_the_bit(kept_run: Path) -> None:
    found = replay(kept_run, 1)
    assert (told(found), found.missing, found.tolerance) == ([], [], 0.0)
    assert (found.start, found.rerun) == ("model-before", [])
    assert [one["update"] for one in found.updates] == [0, 1]
    for one in found.updates:
        assert one["recomputed"] == one["recorded"] and one["recorded"]["grad_norm"] > 0
        assert one["recomputed"]["loss_tokens"] == one["loss_tokens"]
        assert one["token_weight"] == pytest.approx([1 / one["loss_tokens"]] * 2)
        clipped = one["recorded"]["clip_low"] + one["recorded"]["clip_high"]
        assert (clipped > 0) == (one["update"] == 1)  # before any update every ratio is 1
    assert any(one["advantage"] for one in found.samples) and any(one["overlong_penalty"] for one in found.samples)
    assert found.rewards == {"samples": found.batch["samples"], "changed": 0}


def test_a_rate_that_falls_is_that_of_the_step(tmp_path: Path) -> None:
    root = make_run(tmp_path, {"training.final_learning_rate": 1e-4, "training.steps": 2})
    found = replay(root, 2)
    assert (told(found), found.missing) == ([], [])
    assert all(one["recomputed"] == one["recorded"] for one in found.updates)


def test_a_later_update_is_reached_by_making_those_before_it_again(kept_run: Path) -> None:
    found = replay(kept_run, 3, rewards=False)
    assert (told(found), found.missing) == ([], ["rewards: not asked for"])
    assert (found.start, found.rerun) == ("model-before", [1, 2])
    one = found.updates[1]
    assert one["update"] == 1 and one["recomputed"] == one["recorded"] and one["recorded"]["loss"] != 0


def test_a_resumed_run_holds_the_same_and_is_replayed_from_its_checkpoint(kept_run: Path, resumed_run: Path) -> None:
    assert files(resumed_run) == files(kept_run)
    found = replay(resumed_run, 3)
    assert (told(found), found.missing) == ([], [])
    assert (found.start, found.rerun) == ("checkpoints/step-00002", [])


def test_only_what_follows_the_kept_weights_is_made_again(resumed_run: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(resumed_run, tmp_path / "copy"))
    shutil.rmtree(root / "checkpoints/step-00002")
    shutil.rmtree(root / "model-before")
    found = replay(root, 3)
    assert found.start == "checkpoints/step-00002-update-00001" and told(found) == []
    assert "update 0: the oldest weights of this step" in "\n".join(found.missing)
    assert "recomputed" not in found.updates[0] and found.updates[1]["recomputed"] == found.updates[1]["recorded"]
    first = replay(root, 1)
    assert told(first) == [] and first.start is None
    assert "are not kept and cannot be made again: model-before/ is not there" in "\n".join(first.missing)


def test_all_that_the_recipe_may_add_comes_out_to_the_bit(tmp_path: Path) -> None:
    changes = {
        "training.steps": 2,
        "training.epochs_per_rollout": 2,
        "algorithm.kl.mode": "reward",
        "algorithm.kl.coef": 0.05,
        "algorithm.correction.kind": "mask",
        "algorithm.overlong_filtering": True,
        "algorithm.loss_agg_mode": "prompt-mean",
    }
    found = replay(make_run(tmp_path, changes), 2)
    assert (told(found), found.missing, found.rerun) == ([], [], [1])
    assert len(found.updates) == 4 and not all(one["in_loss"] for one in found.samples)


# --- single samples -----------------------------------------------------------------------------------------------


def test_the_tokens_of_a_sample_say_what_the_objective_made_of_them(kept_run: Path) -> None:
    found = replay(kept_run, 1, rewards=False)
    update = found.updates[1]
    clipped: dict[str | None, int] = {}
    loss = 0.0
    for part in [one for one in found.samples if one["draw"] in update["draws"]]:
        shown = replay(kept_run, 1, sample=(part["draw"], part["index"]), rewards=False).sample
        assert shown is not None and shown["status"] == "kept" and shown["update"] == 1
        tokens = shown["tokens"]
        loss += sum(one["loss"] for one in tokens)
        for one in tokens:
            clipped[one["clip"]] = clipped.get(one["clip"], 0) + 1
            gap = one["trainer_logprob"] - one["engine_logprob"]  # the proximal policy here is the engine's
            assert math.isclose(one["ratio"], math.exp(gap), rel_tol=1e-5) and one["entropy"] > 0
    assert math.isclose(loss, update["recomputed"]["loss"], abs_tol=1e-6)
    total = update["recomputed"]["loss_tokens"]
    for side in ("low", "high"):
        assert clipped[side] == round(update["recomputed"][f"clip_{side}"] * total) > 0


def test_of_a_sample_that_was_dropped_there_is_what_the_engine_said(kept_run: Path) -> None:
    lines = [json.loads(line) for line in (kept_run / "samples/step-00001.jsonl").read_text().splitlines()]
    line = next(line for line in lines if line["status"] != "kept" and line["length"])
    shown = replay(kept_run, 1, sample=(line["draw"], line["index"]), rewards=False).sample
    assert shown is not None and shown["status"] == line["status"] and shown["update"] is None
    assert len(shown["tokens"]) == line["length"] and set(shown["tokens"][0]) == {
        *("token", "text", "version", "engine_logprob")
    }
    assert all(one["engine_logprob"] < 0 for one in shown["tokens"])


def test_an_interpolated_proximal_policy_is_that_of_each_update(tmp_path: Path) -> None:
    changes = {
        "runtime.deterministic": False,
        "rollout.max_staleness": 1,
        "rollout.prompts_per_step": 2,
        "training.groups_per_update": 1,
        "training.steps": 4,
        "algorithm.proximal": "interpolate",
        "algorithm.correction.kind": "truncate",
        "run.save_every": 1,
        "run.keep_last": 4,
    }
    root = make_run(tmp_path, changes)
    step = next(entry["step"] for entry in read_metrics(RunFolder(root).metrics) if entry["staleness/max"] == 1)
    found = replay(root, step)
    assert (told(found), found.missing, len(found.updates)) == ([], [], 2)
    (draw,) = found.updates[1]["draws"]
    shown = replay(root, step, sample=(draw, 0), rewards=False).sample
    assert shown is not None and shown["update"] == 1
    for one in shown["tokens"]:  # two updates a step, of which one was made of this one
        age = 2 * (step - 1 - one["version"])
        proximal = one["engine_logprob"] + age / (age + 1) * (one["trainer_logprob"] - one["engine_logprob"])
        assert math.isclose(one["ratio"], math.exp(one["trainer_logprob"] - proximal), rel_tol=1e-5)
        assert math.isclose(one["importance"], min(2.0, math.exp(proximal - one["engine_logprob"])), rel_tol=1e-5)


# --- something was changed ----------------------------------------------------------------------------------------


def trained(root: Path, step: int) -> tuple[int, dict[str, Any]]:
    """Place and line of a sample that was trained on."""
    lines = (RunFolder(root).samples / f"step-{step:05d}.jsonl").read_text().splitlines()
    return next((i, s) for i, s in enumerate(map(json.loads, lines)) if s["in_loss"] and s["length"] > 2)


def test_a_changed_reward_is_named(copied_run: Path) -> None:
    place, line = trained(copied_run, 1)
    change_lines(copied_run, 1, lambda lines: lines[place].update(reward=line["reward"] + 0.5))
    found = told(replay(copied_run, 1))
    sample = (line["draw"], line["index"])
    assert ("reward", *sample) in found and ("shaped reward", *sample) in found
    assert {draw for _, draw, _ in found} == {line["draw"]}  # what was trained on is what was recorded of it


def test_a_changed_advantage_is_named_and_so_is_the_loss(copied_run: Path) -> None:
    place, line = trained(copied_run, 1)
    change_lines(copied_run, 1, lambda lines: lines[place].update(advantage=line["advantage"] + 1e-6))
    found = replay(copied_run, 1)
    assert told(found)[0] == ("advantage", line["draw"], line["index"])
    assert found.differences[0].recomputed == line["advantage"]
    assert {(one.what, one.update) for one in found.differences[1:]} >= {("step 1: loss", 0)}


def test_a_sample_that_was_not_in_the_loss_is_named(copied_run: Path) -> None:
    place, line = trained(copied_run, 1)
    change_lines(copied_run, 1, lambda lines: lines[place].update(in_loss=False))
    first = replay(copied_run, 1, rewards=False).differences[0]
    assert (first.what, first.draw, first.index) == ("part in the loss", line["draw"], line["index"])
    assert (first.recorded, first.recomputed) == (False, True)


def test_skipped_updates_are_skipped_again_and_left_out_of_the_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of the two updates of each step has an infinite loss, in the run and in the replay."""
    plain, number = Trainer.update, itertools.count()

    def update(self: Trainer, batch: Any, inputs: Any, objective: Any) -> Any:
        worse = math.inf if next(number) % 2 else 1.0

        def spoilt(*args: Any) -> Any:
            loss, statistics = objective(*args)
            return loss * worse, statistics

        return plain(self, batch, inputs, spoilt)

    monkeypatch.setattr(Trainer, "update", update)
    root = make_run(tmp_path, {"training.steps": 1})
    found = replay(root, 1, rewards=False)
    first, second = (one["recorded"] for one in found.updates)
    assert (first["skipped"], second["skipped"]) == (False, True)
    assert told(found) == []
    (metrics,) = read_metrics(RunFolder(root).metrics)
    assert (metrics["updates"], metrics["loss"]) == (1, first["loss"])


@pytest.mark.parametrize("name", ["token_ids", "logprobs", "versions", "prompt_ids"])
def test_a_changed_token_is_named(copied_run: Path, name: str) -> None:
    place, line = trained(copied_run, 1)

    def change(arrays: dict[str, Any]) -> None:
        token = 0 if name == "prompt_ids" else int(arrays["lengths"][:place].sum()) + 1
        old = arrays[name][token]
        arrays[name][token] = old - 0.25 if name == "logprobs" else 5 if old == 4 else 4

    change_tokens(copied_run, 1, change)
    found = told(replay(copied_run, 1, rewards=False))
    assert ("its stored tokens were changed: their checksum differs", line["draw"], line["index"]) in found
    if name == "token_ids":
        assert ("its tokens do not decode to its response", line["draw"], line["index"]) in found
    if name in ("token_ids", "logprobs"):
        assert any(what == "step 1: loss" for what, *_ in found)


def test_versions_that_are_not_those_of_the_tokens_are_named(copied_run: Path) -> None:
    place, line = trained(copied_run, 2)
    change_lines(copied_run, 2, lambda lines: lines[place].update(versions=[0, 0]))
    found = replay(copied_run, 2, rewards=False)
    assert line["versions"] == [1, 1]
    assert told(found) == [("its versions are not those of its tokens, [1, 1]", line["draw"], line["index"])]


@pytest.mark.parametrize("version", [-1, 4])
def test_tokens_of_a_policy_that_was_not_trained_then_are_named(copied_run: Path, version: int) -> None:
    """Whoever changed them has made the checksum anew."""
    _, line = trained(copied_run, 2)
    sample = (line["draw"], line["index"])
    stored = read_step(RunFolder(copied_run), 2)

    def changed(one: Sample) -> Sample:
        same = (one.request_id, one.index) == sample
        return replace(one, versions=np.full_like(one.versions, version)) if same else one

    groups = [replace(group, samples=tuple(map(changed, group.samples))) for group, _ in stored.groups]
    tokens_path(RunFolder(copied_run).samples, 2).write_bytes(TokenArrays.of(groups).to_bytes())
    found = replay(copied_run, 2, rewards=False)
    assert ("policy version of a token", *sample) in told(found)


@pytest.mark.parametrize("token", [-7, 10**6])
def test_a_token_that_no_model_has_is_named(copied_run: Path, token: int) -> None:
    place, line = trained(copied_run, 1)

    def change(arrays: dict[str, Any]) -> None:
        arrays["token_ids"][int(arrays["lengths"][:place].sum())] = token

    change_tokens(copied_run, 1, change)
    found = replay(copied_run, 1, rewards=False)
    sample = (line["draw"], line["index"])
    assert ("its tokens do not decode to its response", *sample) in told(found)
    assert f"sample {sample[0]}:{sample[1]} has a token {token}, but the model" in found.missing[-1]


def test_a_changed_verdict_changes_the_decision_about_the_group(copied_run: Path) -> None:
    _, line = trained(copied_run, 1)

    def change(lines: list[dict[str, Any]]) -> None:
        for one in lines:
            if one["draw"] == line["draw"]:
                one["correct"] = True

    change_lines(copied_run, 1, change)
    found = replay(copied_run, 1)
    assert ("decision of dynamic sampling", line["draw"], None) in told(found)
    assert ("reward", line["draw"]) in {(what, draw) for what, draw, _ in told(found)}


def test_a_changed_report_is_named_and_ends_the_way_to_later_steps(copied_run: Path) -> None:
    path = updates_path(RunFolder(copied_run).samples, 1)
    reports = json.loads(path.read_text())
    reports[1]["grad_norm"] *= 1 + 1e-15
    path.write_text(json.dumps(reports))
    assert [(d.what, d.update) for d in replay(copied_run, 1).differences] == [("step 1: grad_norm", 1)]
    later = replay(copied_run, 3)
    assert [(d.what, d.update) for d in later.differences] == [("step 1: grad_norm", 1)]
    assert "an update on the way there does not come out as it was recorded" in later.missing[-1]


def test_changed_weights_are_seen(copied_run: Path) -> None:
    from safetensors.numpy import load_file, save_file

    file = copied_run / "model-before/model.safetensors"
    weights = load_file(file)
    name = next(iter(weights))
    weights[name] = weights[name] * np.float32(1.01)
    save_file(weights, file, metadata={"format": "pt"})
    assert ("step 1: loss", 0) in {(d.what, d.update) for d in replay(copied_run, 1).differences}


# --- a file that no run writes so ---------------------------------------------------------------------------------

ODD = [math.nan, math.inf, -math.inf, "text", [], {"a": 1}, 10**400]


@pytest.mark.parametrize("key", ["reward", "shaped_reward", "advantage", "draw", "length", "parts"])
def test_a_stored_sample_with_something_else_for_a_number_is_refused_with_file_line_and_key(
    copied_run: Path, key: str
) -> None:
    path = copied_run / "samples/step-00001.jsonl"
    whole = path.read_text()
    for value in [one for one in ODD if key != "parts" or one != {"a": 1}]:
        path.write_text(whole)
        change_lines(copied_run, 1, lambda lines, value=value: lines[2].update({key: value}))
        with pytest.raises(UserError, match=rf"step-00001\.jsonl:3: {key}: Input should be .*, found "):
            replay(copied_run, 1, rewards=False)


def test_a_sample_in_the_loss_without_its_advantage_is_refused(copied_run: Path) -> None:
    place, _ = trained(copied_run, 1)
    change_lines(copied_run, 1, lambda lines: lines[place].update(advantage=None))
    with pytest.raises(UserError, match=rf":{place + 1}: advantage: should be a number, .* found null"):
        replay(copied_run, 1)


def test_a_report_without_its_loss_is_no_proof_of_one(copied_run: Path) -> None:
    path = copied_run / "samples" / "step-00001.updates.json"
    path.write_text("[{}, {}]")
    with pytest.raises(UserError, match="update 0: loss: Field required"):
        replay(copied_run, 1)


def test_a_sample_that_is_there_twice_is_named(copied_run: Path) -> None:
    path = copied_run / "samples" / "step-00001.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line | {"index": 7}) + "\n" for line in lines))
    with pytest.raises(UserError, match=f"sample {lines[0]['draw']}:7 is there twice"):
        replay(copied_run, 1)


@pytest.mark.parametrize("key", ["loss", "loss_tokens", "statistics", "statistics.ratio", "mismatch.tokens"])
def test_a_stored_report_with_something_else_for_a_number_is_refused_with_update_and_key(
    copied_run: Path, key: str
) -> None:
    path = updates_path(RunFolder(copied_run).samples, 1)
    whole = path.read_text()
    for value in ODD:
        reports = json.loads(whole)
        *section, last = key.split(".")
        of = reports[1][section[0]] if section else reports[1]
        of[last] = value
        path.write_text(json.dumps(reports))
        with pytest.raises(UserError, match=rf"updates\.json: update 1: {key}[.\w]*: (Input|List) should .*, found "):
            replay(copied_run, 1, rewards=False)


@pytest.mark.parametrize("value", [{"packages": "text"}, {"resumed": "text"}, {"resumed": [3]}, {"cores": [1]}])
def test_an_environment_that_says_nothing_is_no_obstacle(copied_run: Path, value: dict[str, Any]) -> None:
    path = RunFolder(copied_run).environment
    path.write_text(json.dumps(json.loads(path.read_text()) | value))
    assert told(replay(copied_run, 1, rewards=False)) == []


# --- something is not there ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path_of", [tokens_path, updates_path])
def test_a_step_without_one_of_its_files_is_no_step_of_a_run(copied_run: Path, path_of: Any) -> None:
    path = path_of(RunFolder(copied_run).samples, 2)
    path.unlink()
    with pytest.raises(UserError, match=path.name):
        replay(copied_run, 2, rewards=False)
    assert path.name in replay(copied_run, 3, rewards=False).missing[-1], "nor on the way to another one"
    assert replay(copied_run, 1).missing == []


def test_without_deterministic_mode_numbers_are_compared_within_a_tolerance(copied_run: Path) -> None:
    config = RunFolder(copied_run).config
    config.write_text(config.read_text().replace("deterministic: true", "deterministic: false"))
    path = updates_path(RunFolder(copied_run).samples, 1)
    reports = json.loads(path.read_text())
    reports[0]["grad_norm"] *= 1.0001
    reports[1]["grad_norm"] *= 1.01
    path.write_text(json.dumps(reports))
    found = replay(copied_run, 1)
    assert found.tolerance and "runtime.deterministic is false" in found.notes[0]
    assert [(d.what, d.update) for d in found.differences] == [("step 1: grad_norm", 1)]
    assert (
        "without runtime.deterministic updates made again from there lead elsewhere"
        in replay(copied_run, 3, rewards=False).missing[-1]
    )


def test_another_version_of_torch_is_said_and_allowed_for(copied_run: Path) -> None:
    path = RunFolder(copied_run).environment
    environment = json.loads(path.read_text())
    environment["packages"]["torch"] = "1.0"
    path.write_text(json.dumps(environment))
    found = replay(copied_run, 1, rewards=False)
    assert found.tolerance and "torch was 1.0" in found.notes[0] and told(found) == []


def test_a_reward_that_cannot_be_had_does_not_keep_the_rest_from_being_made(copied_run: Path) -> None:
    path = RunFolder(copied_run).fingerprint
    marks = json.loads(path.read_text())
    marks["reward"] = {"kind": "python", "function": "mine"}
    path.write_text(json.dumps(marks))
    found = replay(copied_run, 1)
    assert found.rewards is None and "Python function (mine)" in found.missing[0]
    assert found.updates[0]["recomputed"] == found.updates[0]["recorded"]


def test_a_damaged_checkpoint_is_no_start(resumed_run: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(resumed_run, tmp_path / "copy"))
    file = root / "checkpoints/step-00002/model/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    (missing,) = replay(root, 3).missing
    assert "step-00002 is damaged: model/model.safetensors is not what was written" in missing


def test_more_cores_than_the_run_had_add_in_another_order(copied_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1000)
    assert replay(copied_run, 1, rewards=False).tolerance == 0.0  # one thread, whatever there is
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    found = replay(copied_run, 1, rewards=False)
    assert found.tolerance and "cores, here are 1000" in found.notes[0]


@pytest.mark.parametrize("damage", [b"", b"\x08\0\0\0\0\0\0\0{}      ", None])
def test_damaged_tokens_are_refused_with_their_file(copied_run: Path, damage: bytes | None) -> None:
    path = tokens_path(RunFolder(copied_run).samples, 1)
    path.write_bytes(path.read_bytes()[:-5] if damage is None else damage)
    with pytest.raises(UserError, match=r"step-00001\.safetensors: not the tokens of a step"):
        replay(copied_run, 1)


def test_tokens_of_another_step_are_refused(copied_run: Path) -> None:
    samples = RunFolder(copied_run).samples
    shutil.copy(tokens_path(samples, 2), tokens_path(samples, 1))
    with pytest.raises(UserError, match=r"holds other samples than step-00001\.jsonl"):
        replay(copied_run, 1)


# --- the files ----------------------------------------------------------------------------------------------------


def test_tokens_come_back_as_they_were(kept_run: Path) -> None:
    arrays = TokenArrays.read(tokens_path(RunFolder(kept_run).samples, 1))
    assert [arrays.token_ids.dtype, arrays.logprobs.dtype, arrays.versions.dtype] == [np.int32, np.float32, np.int32]
    lines = [json.loads(line) for line in (kept_run / "samples/step-00001.jsonl").read_text().splitlines()]
    assert arrays.lengths.tolist() == [line["length"] for line in lines]
    size = tokens_path(RunFolder(kept_run).samples, 1).stat().st_size
    assert size < 18 * len(arrays.token_ids) + 8 * len(lines) + 4 * len(arrays.prompt_ids) + 1000


def test_what_the_trainer_computed_is_stored_of_what_it_trained_on(kept_run: Path) -> None:
    folder, compared = RunFolder(kept_run).samples, 0
    for step in (1, 2, 3):
        arrays, rows = TokenArrays.read(tokens_path(folder, step)), rows_of(folder, step)
        ends = np.cumsum(arrays.lengths)
        for row, end, length in zip(rows, ends, arrays.lengths, strict=True):
            trainer, entropy = arrays.trainer_logprobs[end - length : end], arrays.entropy[end - length : end]
            assert np.isfinite(entropy).all() if row["status"] == "kept" else np.isnan(entropy).all()
            assert row["entropy"] == (
                pytest.approx(float(np.mean(entropy, dtype=np.float64))) if row["in_loss"] else None
            )
            if np.isfinite(trainer).all():
                compared += 1
                np.testing.assert_allclose(trainer, arrays.logprobs[end - length : end], atol=1e-4)
                assert row["gap_max"] < 1e-4 and row["logprob_trainer"] == pytest.approx(
                    row["logprob_engine"], abs=1e-4
                )
    assert compared


def test_all_files_of_later_steps_go_when_they_are_made_again(copied_run: Path) -> None:
    samples = RunFolder(copied_run).samples
    (samples / "step-00003-note.txt").touch()
    discard_samples(samples, after=1)
    kept = [f"step-00001.{kind}" for kind in ("jsonl", "safetensors", "updates.json")]
    assert sorted(path.name for path in samples.glob("step-*")) == [*kept, "step-00003-note.txt"]


def test_a_tolerance_is_relative_and_near_zero_a_hundredth_of_it() -> None:
    def differ(was: float | None, now: float, tolerance: float) -> bool:
        return bool(list(reports_differ({"loss": was}, {"loss": now}, tolerance, None)))

    assert differ(2.0, 2.25, 0.1) and not differ(2.0, 2.125, 0.1)
    assert differ(0.0, 0.002, 0.1) and not differ(0.0, 0.0005, 0.1)
    assert differ(2.0, 2.0 + 2**-50, 0.0) and not differ(2.0, 2.0, 0.0) and differ(None, 2.0, 0.1)


# --- settings that were changed on the way ------------------------------------------------------------------------


def test_each_step_is_replayed_with_the_settings_it_had(tmp_path: Path) -> None:
    """Two steps, then two with another objective, other rates and other sizes; a KL that needs the first weights."""
    root = make_run(tmp_path, {"training.steps": 2})
    changes = {
        "training.steps": 4,
        "training.learning_rate": 1e-3,
        "training.weight_decay": 0.5,
        "training.max_grad_norm": 0.1,
        "training.groups_per_update": 1,
        "rollout.prompts_per_step": 3,
        "rollout.samples_per_prompt": 3,
        "rollout.max_response_length": 10,
        "algorithm.clip_ratio_high": 0.02,
        "algorithm.loss_agg_mode": "prompt-mean",
        "algorithm.overlong_buffer.len": 2,
        "algorithm.overlong_filtering": True,
        "algorithm.advantage.kind": "leave-one-out",
        "algorithm.kl": {"mode": "loss", "coef": 0.1},
        "algorithm.filter_groups.metric": "score",
        "algorithm.filter_groups.tolerance": 0.001,
    }
    given = {"rows": None, "reward": None, "resume": RunFolder(root)}
    run(root, recipe(tmp_path) | changes, Recorder(), **given)
    for step in (1, 2, 3, 4):
        found = replay(root, step)
        assert (told(found), found.missing, len(found.updates)) == ([], [], 2 if step < 3 else 3), step
        assert all(one["recomputed"] == one["recorded"] for one in found.updates)
    shutil.rmtree(root / "checkpoints/step-00002")
    found = replay(root, 3)
    assert found.rerun == [1, 2] and told(found) == [] and found.missing == []
