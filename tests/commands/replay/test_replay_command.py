"""``dapo replay``: what it prints and ends with, and what it says of wrong arguments."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from replay_cases import change_lines
from typer.testing import CliRunner

from dapo.commands import app
from dapo.commands.replay.command import _print_tokens


def dapo_replay(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


def flat(text: str) -> str:
    return " ".join(text.split())


def test_a_step_that_comes_out_the_same_is_exit_code_0_and_the_last_line_says_so(kept_run: Path) -> None:
    result = dapo_replay(kept_run, "--step", 1)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[-1] == "nothing differs (to the bit)"
    assert any(line.startswith("weights: from model-before") for line in lines)
    header = next(k for k, line in enumerate(lines) if line.startswith("update  groups"))
    assert [line.split()[-1] for line in lines[header + 1 : header + 3]] == ["same", "same"]


def test_without_a_step_the_last_one_with_samples_is_made_again(kept_run: Path) -> None:
    assert "step 3: " in dapo_replay(kept_run, "--no-rewards").stdout


def test_what_differs_is_named_and_is_exit_code_1(kept_run: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(kept_run, tmp_path / "copy"))

    def change(lines: list[dict[str, Any]]) -> None:
        next(line for line in lines if line["in_loss"] and line["length"])["advantage"] = 7.0

    change_lines(root, 1, change)
    result = dapo_replay(root, "--step", 1, "--no-rewards")
    assert result.exit_code == 1
    assert "differs: sample 0:0: advantage: recorded 7.0, now " in result.stdout
    assert result.stdout.splitlines()[-1].endswith(" differences")
    row = next(line for line in result.stdout.splitlines() if line.startswith("0 "))
    assert row.endswith("differs")


def test_one_early_change_does_not_flood_the_output(kept_run: Path, tmp_path: Path) -> None:
    """Other weights at the start: each number of each update differs, and of all samples none."""
    from safetensors.numpy import load_file, save_file

    root = Path(shutil.copytree(kept_run, tmp_path / "copy"))
    file = root / "model-before/model.safetensors"
    save_file({name: w * 1.01 for name, w in load_file(file).items()}, file, metadata={"format": "pt"})
    arguments = (root, "--step", 1, "--no-rewards")
    everything = json.loads(dapo_replay(*arguments, "--json").stdout)["differences"]
    of_first = [one for one in everything if one.get("update") == 0]
    later = [one for one in everything if one.get("update")]
    lines = dapo_replay(*arguments).stdout.splitlines()
    assert [line.startswith("differs: step 1, update 0: ") for line in lines].count(True) == 4
    assert f"and {len(of_first) - 4} more of update 0 (--json shows them)" in lines
    assert f"and {len(later)} numbers of updates after update 0, whose weights follow from it" in "\n".join(lines)
    assert sum(line.startswith(("differs: ", "and ")) for line in lines) <= 11 < len(everything)
    assert lines[-1] == f"{len(everything)} differences"


def test_a_change_of_every_reward_is_told_by_its_kind(kept_run: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(kept_run, tmp_path / "copy"))

    def change(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            line["advantage"] = None if line["advantage"] is None else line["advantage"] + 1

    change_lines(root, 1, change)
    result = dapo_replay(root, "--step", 1, "--no-rewards")
    shown = [line for line in result.stdout.splitlines() if line.startswith("differs: sample ")]
    assert len(shown) == 4 and all(": advantage: recorded " in line for line in shown)
    assert "more that differ so: advantage (--json shows them)" in result.stdout


def test_a_spoilt_number_is_an_error_of_the_file_and_not_of_the_program(kept_run: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(kept_run, tmp_path / "copy"))
    change_lines(root, 1, lambda lines: lines[0].update(reward=float("nan")))
    result = dapo_replay(root, "--step", 1)
    assert result.exit_code == 1
    assert "step-00001.jsonl:1: reward: Input should be a finite number, found NaN" in flat(result.stderr)


def test_the_tokens_of_a_sample_are_a_table(kept_run: Path) -> None:
    result = dapo_replay(kept_run, "--step", 1, "--sample", "0:0", "--no-rewards")
    assert result.exit_code == 0, result.output
    lines = (kept_run / "samples/step-00001.jsonl").read_text().splitlines()
    line = next(one for one in map(json.loads, lines) if (one["draw"], one["index"]) == (0, 0))
    assert f"sample 0:0 of row {line['row']}, kept, in update 0\n" in result.stdout
    assert result.stdout.startswith("sample 0:0 "), "what was asked for comes first"
    table = result.stdout[result.stdout.index("place ") : result.stdout.index("\n\n")].splitlines()
    assert len(table) == 1 + line["length"]
    assert [row.split()[0] for row in table[1:]] == [str(place) for place in range(line["length"])]


def test_what_cannot_be_made_again_is_said_first_and_not_counted_as_the_same(kept_run: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(kept_run, tmp_path / "copy"))
    for weights in (root / "model-before", *(root / "checkpoints").iterdir()):
        shutil.rmtree(weights, ignore_errors=True)
    result = dapo_replay(root, "--step", 2, "--no-rewards")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("could not be made again: ")
    assert any(line.startswith("could not be made again: losses and gradients: ") for line in lines[:3])
    assert not any(line.startswith("update  groups") for line in lines), "no table of dashes"
    assert lines[-1].startswith("of what needs no weights nothing differs; not made again: ")
    assert "losses and gradients" in lines[-1] and "rewards" in lines[-1]


def test_a_token_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    token = {"token": 9, "text": "[bold]\x1b[31m:smile:\n", "version": 0, "engine_logprob": -1.0, "clip": "high"}
    _print_tokens({"draw": 1, "index": 0, "row": 2, "status": "kept", "update": 3, "tokens": [token]})
    printed = capsys.readouterr().out
    assert "[bold]\\x1b[31m:smile:\\n" in printed and "high" in printed and "\x1b" not in printed


def test_json_holds_all_of_it(kept_run: Path) -> None:
    arguments = ("--step", 1, "--sample", "0:1", "--json", "--no-rewards")
    result = dapo_replay(kept_run, *arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["differences"] == [] and found["start"] == "model-before" and found["tolerance"] == 0.0
    assert all(one["recomputed"] == one["recorded"] for one in found["updates"])
    assert found["sample"]["index"] == 1 and found["sample"]["tokens"][0]["ratio"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--step", "9"], 2, "--step 9: no samples of this step; there are those of step 1, 2, 3"),
        (["--step", "1", "--sample", "0"], 2, "--sample 0: expected DRAW:INDEX, such as 12:0; dapo inspect RUN"),
        (["--step", "1", "--sample", "999:0"], 2, "--sample 999:0: step 1 has no draw 999; there are 0, "),
        (["--step", "1", "--sample", "0:7"], 2, "--sample 0:7: draw 0 has no sample 7; there are 0, 1, 2, 3"),
    ],
)
def test_wrong_arguments_are_explained(kept_run: Path, arguments: list[str], code: int, words: str) -> None:
    result = dapo_replay(kept_run, *arguments)
    assert result.exit_code == code
    assert flat(result.stderr).startswith(f"error: {words}")


def test_a_run_without_samples_says_why(kept_run: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(kept_run, tmp_path / "copy"))
    for path in (root / "samples").glob("step-*"):
        path.unlink()
    result = dapo_replay(root, "--step", 1)
    assert result.exit_code == 1 and "no samples were saved, which a replay is made from: none yet" in flat(
        result.stderr
    )
    config = root / "config.yaml"
    config.write_text(config.read_text().replace("save_samples: true", "save_samples: false"))
    assert "its recipe says run.save_samples=false" in flat(dapo_replay(root, "--step", 1).stderr)


def test_what_is_no_run_folder_is_said(tmp_path: Path) -> None:
    result = dapo_replay(tmp_path, "--step", 1)
    assert result.exit_code == 1 and "is not a run folder" in flat(result.stderr)
