"""Which recipes can be compared, what the table counts, and its intervals, by hand."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from compared import stored_comparison, write_recipes
from dapo.checks import settings
from dapo.commands import app
from dapo.comparison.folder import Comparison, declare
from dapo.comparison.recipes import Variant, limited, named_variants, needs
from dapo.comparison.table import Table, paired
from dapo.config import build_config
from dapo.errors import ConfigError, UserError
from dapo.evaluation.statistics import half, noise
from dapo.evaluation.votes import Shown, Vote, add_vote

TWO = {"a": Variant("a.yaml"), "b": Variant("a.yaml", ("algorithm.clip_ratio_high=0.2",))}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_recipes(tmp_path)
    return tmp_path


def declared(variants: dict[str, Variant] = TWO, **others: Any) -> Any:
    given: dict[str, Any] = {"seeds": [1, 2], "budget": {"minutes": 1.0}} | others
    return declare(Path("out"), variants, given.pop("seeds"), given.pop("budget"), **given)


# --- what can be compared ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("data.train=other.jsonl", "data.train"),
        ("evaluation.data=other.jsonl", "evaluation.data"),
        ("evaluation.temperature=0.5", "evaluation.temperature"),
        ("rollout.max_response_length=6", "evaluation.max_response_length"),  # which it has by default
        ("model.path=large", "model.path"),
        ("reward.after='#'", "reward.after"),
    ],
)
def test_what_has_to_be_the_same_is_named_and_may_be_allowed_to_differ(here: Path, change: str, key: str) -> None:
    other = {"a": Variant("a.yaml"), "b": Variant("a.yaml", (change,))}
    with pytest.raises(ConfigError, match=rf"has to be the same:\n{key}: a has .*; b has [\s\S]*--allow {key}"):
        declared(other)
    declared(other, allowed=[key.partition(".")[0]])
    told = Comparison.read(Path("out")).recipes
    assert told["a"]["curve"] and told["b"]["curve"] == (key in ("data.train", "model.path"))  # measured alike


def test_who_declares_at_once_loses_nothing_of_the_others(here: Path) -> None:
    others = [{"a": TWO["a"], f"b{k}": Variant("a.yaml", (f"algorithm.clip_ratio_high=0.3{k}",))} for k in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda k: declared(others[k], seeds=[k]), range(4)))
    found = Comparison.read(Path("out"))
    assert sorted(found.recipes) == ["a", "b0", "b1", "b2", "b3"] and found.seeds == [0, 1, 2, 3]


def test_how_often_runs_are_evaluated_may_differ_and_what_differs_is_recorded(here: Path) -> None:
    b = Variant("a.yaml", ("evaluation.every=2", "algorithm.kl.mode=loss", "training.steps=7"))
    declared({"a": Variant("a.yaml"), "b": b})
    differ = Comparison.read(Path("out")).differ
    assert differ == {"algorithm.kl.mode": {"a": "off", "b": "loss"}, "evaluation.every": {"a": 1, "b": 2}}
    assert needs(b.phases(Path("out"))) == ["reference", "reward (exact)"]


def test_phases_and_stages_are_compared_with_runs_by_where_they_begin(here: Path) -> None:
    several = {"a": Variant("a.yaml"), "dpo": Variant("dpo.yaml"), "phases": Variant("phases.yaml")}
    declared(several)
    told = Comparison.read(Path("out")).recipes
    assert [told[name]["phases"] for name in several] == [["."], ["."], ["sft", "rl"]]
    assert [told[name]["curve"] for name in several] == [True, False, True]
    assert told["dpo"]["needs"] == ["preference pairs", "reference"]
    assert told["phases"]["needs"] == ["demonstrations", "reward (exact)"]
    with pytest.raises(ConfigError, match=r"model\.path"):
        declared({**several, "phases": Variant("phases.yaml", ("phases.sft.model.path=large",))})
    with pytest.raises(ConfigError, match="nothing says how good the models are"):
        declared({"dpo": Variant("dpo.yaml"), "b": Variant("dpo.yaml", ("dpo.beta=0.2",))})


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"budget": {"minutes": None, "samples": None}}, r"one budget is needed.*\(given: none\)"),
        ({"budget": {"minutes": 1.0, "tokens": 5}}, r"given: minutes 1, tokens 5"),
        ({"budget": {"samples": -1}}, "one budget is needed"),
        ({"seeds": [1, 1]}, "different whole numbers"),
        ({"seeds": []}, "different whole numbers"),
        ({"variants": {"a": Variant("a.yaml")}}, "two recipes at least"),
        ({"variants": {n: Variant("a.yaml", ("model.path=./none",)) for n in "ab"}}, r"\./none: no such folder"),
        ({"variants": {"a": Variant("a.yaml"), "b": Variant("none.yaml")}}, "none.yaml: cannot read the recipe"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(here: Path, others: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        declared(**others)
    assert not (here / "out").exists()


def test_a_comparison_grows_by_recipes_and_seeds_and_is_no_other_one(here: Path) -> None:
    declared()
    declared({"c": Variant("a.yaml", ("algorithm.clip_ratio_c=3",)), "a": TWO["a"]}, seeds=[3])
    found = Comparison.read(Path("out"))
    assert (list(found.recipes), found.seeds, found.budget) == (["a", "b", "c"], [1, 2, 3], ("minutes", 1.0))
    assert found.differ["algorithm.clip_ratio_high"] == {"a": 0.28, "b": 0.2, "c": 0.28}
    for change in (
        {"budget": {"minutes": 2.0}},
        {"variants": {**TWO, "a": Variant("a.yaml", ("rollout.temperature=2",))}},
    ):
        with pytest.raises(ConfigError, match=r"another comparison is there.*\n.*(minutes|temperature): was"):
            declared(**change)
    (here / "out/comparison.json").write_text('{"seeds": [1]}')
    with pytest.raises(UserError, match=r"out/comparison.json: cannot be read: KeyError: 'budget'"):
        Comparison.read(Path("out"))
    (here / "other").mkdir()
    (here / "other/.comparison.json.7.tmp").touch()  # the same command on another GPU is writing it
    declare(Path("other"), TWO, [1], {"minutes": 1.0})
    (here / "other/comparison.json").rename(here / "other/file")
    with pytest.raises(ConfigError, match="exists and is no comparison"):
        declare(Path("other"), TWO, [1], {"minutes": 1.0})


def test_recipes_are_named_by_their_changes_or_by_a_name_and_never_twice() -> None:
    words = ["x/a.yaml", "x/a.yaml algorithm.clip_ratio_high=0.2", "long=b.yaml seed=3 data.template=chat"]
    assert named_variants(words, ["run.save_every=5"]) == {
        "a": Variant("x/a.yaml", ("run.save_every=5",)),
        "a-clip_ratio_high-0.2": Variant("x/a.yaml", ("run.save_every=5", "algorithm.clip_ratio_high=0.2")),
        "long": Variant("b.yaml", ("run.save_every=5", "seed=3", "data.template=chat")),
    }
    with pytest.raises(ConfigError, match="a: is given twice"):
        named_variants(["a.yaml", "b/a.yaml"])


def test_the_disk_that_a_cell_needs_follows_from_its_budget_and_not_from_its_steps() -> None:
    run = {"save_every": 1, "keep_last": None, "keep_every": 2}
    config = limited(build_config({"model": {"path": "m"}, "run": run}), "samples", 4096)
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    assert settings.checkpoints_kept(config) == 2
    assert settings._samples_bytes(config) == 4096 * longest * settings.BYTES_PER_TOKEN


def test_no_secret_is_written_down(here: Path) -> None:
    secret = ("rollout.engine=vllm", "rollout.engine_args={api_key: hidden}")
    declared({"a": Variant("a.yaml", secret), "b": Variant("a.yaml", (*secret, "rollout.temperature=2"))})
    assert "hidden" not in (here / "out/comparison.json").read_text()


# --- intervals --------------------------------------------------------------------------------------------------------


def test_noise_is_pooled_over_recipes_and_single_seeds_say_nothing_of_it() -> None:
    # variances 2 (1 and 3; 1 d.f.) and 1 (1, 2, 3; 2 d.f.): (1 * 2 + 2 * 1) / 3
    found = noise([[1.0, 3.0], [1.0, 2.0, 3.0], [9.0]])
    assert found == (pytest.approx((4 / 3) ** 0.5), 3)
    assert half(found, 4) == pytest.approx(3.182 * (4 / 3) ** 0.5 / 2)
    assert half(found, 2, 2) == pytest.approx(3.182 * (4 / 3) ** 0.5)
    assert noise([[1.0], [2.0]]) is None


def test_gains_are_paired_by_row_and_averaged_over_seeds() -> None:
    first, other = [{"x": 0.0, "y": 1.0}, {"x": 0.0, "y": 0.0}], [{"x": 1.0, "y": 1.0, "z": 0.0}, {"x": 1.0, "y": 0.0}]
    found = paired(first, other)  # x: 1 - 0; y: 1/2 - 1/2; z is not in all
    assert found is not None and (found.value, found.low, found.high) == (0.5, 0.0, 1.0)  # both rows may be x, or y
    same = paired(first, first)
    assert same is not None and same.value == 0.0
    assert paired(first, [{"z": 1.0}]) is None and paired(first, []) is None


# --- the table --------------------------------------------------------------------------------------------------------


def line(table: Table, label: str) -> list[str]:
    return next(row[1:] for row in table.lines() if row[0] == label)


def test_recipes_are_compared_where_all_have_come_and_by_what_it_cost(here: Path) -> None:
    stored_comparison(
        here / "out", {"first": {1: [0.0, 0.25], 2: [0.0, 0.5]}, "fast": {1: [0.0, 0.5, 1.0]}, "gone": {}}
    )
    (here / "out/fast-seed-2.json").write_text(json.dumps({"failed": "no memory"}))
    table = Table.read(here / "out")
    # all have come to 1 minute (two steps of the fast one), 24 samples and 100 tokens (one step)
    assert table.ends == {"minutes": 1.0, "samples": 24.0, "tokens": 100.0}
    assert table.values("minutes") == {"first": [0.25, 0.5], "fast": [1.0], "gone": []}
    assert table.values("samples") == {"first": [0.25, 0.5], "fast": [0.5], "gone": []}
    table.ends["samples"] = 12.0  # between two evaluations of each
    assert table.values("samples") == {"first": [0.125, 0.25], "fast": [0.25], "gone": []}
    table.ends["samples"] = -1.0  # where no curve begins
    assert table.values("samples") == {"first": [], "fast": [], "gone": []}
    table = Table.read(here / "out")
    # deviation of 25 and 50: 17.68; 12.706 * 17.68 = 224.6, / sqrt(2) = 158.8, * sqrt(1 + 1/2) = 275.1
    assert line(table, "held-out accuracy, after training") == ["37.5% ± 158.8", "100.0% ± 224.6", "-"]
    assert line(table, "minus the first, by seeds") == ["", "+62.5 ± 275.1", ""]
    rows = line(table, "minus the first, by rows")[1]  # right are 2 and 4 rows of 8, then 8: gains 0, 1/2 and 1
    assert rows.startswith("+62.5 (+") and line(table, "minus the first, by rows")[::2] == ["", ""]
    assert line(table, "held-out accuracy at 24 samples") == ["37.5% ± 158.8", "50.0% ± 224.6", "-"]
    assert line(table, "minutes") == ["1.00", "1.00", "-"] and line(table, "samples") == ["24", "48", "-"]
    assert line(table, "tokens sampled") == ["100", "200", "-"] and line(table, "tokens trained") == ["150", "300", "-"]
    assert table.cells()[2]["operations"] == 1000 * (6 * 240 + 2 * 200)
    assert line(table, "memory") == ["1.00 GiB", "1.00 GiB", "-"]
    assert line(table, "updates skipped")[:2] == ["2 of 2 steps", "2 of 2 steps"]
    assert line(table, "steps with alarms")[1] == "2 of 2 steps"
    assert line(table, "seeds done") == ["2 of 2", "1 of 2", "0 of 2"]
    assert line(table, "failed") == ["none", "seed 2", "none"]
    assert table.failures() == [f"fast-seed-2 failed: no memory (see {here / 'out/fast-seed-2.log'})"]


def test_a_comparison_is_read_again_by_compare_and_by_report(here: Path) -> None:
    stored_comparison(here / "out", {"first": {1: [0.0, 0.25]}, "fast": {1: [0.0, 0.5]}})
    add_vote(here / "out", Vote("1?", Shown("first", "x"), Shown("fast", "y"), "right", "ann", 1.0, row=1))
    said = CliRunner().invoke(app, ["compare", "out"])
    assert said.exit_code == 0, said.output
    assert "25.0%" in said.output and "50.0%" in said.output
    told = json.loads((here / "out/table.json").read_text())
    assert [cell["accuracy"] for cell in told["cells"]] == [0.25, 0.5]
    rows = (here / "out/table.csv").read_text().splitlines()
    assert rows[0].startswith("recipe,seed,failed,accuracy,minutes") and rows[2].startswith("fast,1,,0.5,0.5")
    told = (here / "out/table.md").read_text()
    assert "| 25.0% | 50.0% |" in told and "| 1 voter | fast | first | 0 | 0 | 1 | 0 | 0.0% (0.0% to 79.3%) |" in told
    said = CliRunner().invoke(app, ["report", "out", "--output", "page"])
    assert said.exit_code == 0, said.output
    page = (here / "page/report.html").read_text()
    assert "In what the recipes differ" in page and "data:image/svg+xml" in page and "clip_ratio_high" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.yaml", "dpo.yaml"], "one budget is needed"),
        (["a.yaml", "a.yaml", "--minutes", "1"], "is given twice"),
        (["a.yaml", "dpo.yaml", "--minutes", "1", "--seeds", "1,x"], "--seeds 1,x: expected whole numbers"),
        (
            ["a.yaml", "dpo.yaml", "--minutes", "1", "--only", "b"],
            "--only b: there is no such cell; there are: a-seed-1",
        ),
        (["a.yaml", "dpo.yaml", "--minutes", "1", "--out", "a.yaml"], "--out a.yaml: exists and is no comparison"),
        (["a.yaml", "held.jsonl", "--minutes", "1"], "held.jsonl"),
        (["out", "--minutes", "1"], "is read as it is"),
    ],
)
def test_what_is_wrong_on_the_command_line_is_said(here: Path, words: list[str], message: str) -> None:
    stored_comparison(here / "out", {"first": {1: [0.0]}, "other": {1: [0.0]}})
    done = CliRunner().invoke(app, ["compare", *words, *([] if "--out" in words else ["--out", "new"])])
    assert done.exit_code == 2 and message in " ".join(done.output.split()), done.output
