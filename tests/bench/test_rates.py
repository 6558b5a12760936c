"""The rates of ``dapo plan`` come out of what they were put into."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import rates
from dapo.config import load_config
from dapo.config.plan import recipe_path
from dapo.plan.estimate import Assumed, Estimate, estimate_for
from dapo.plan.hardware import rates_for


@pytest.fixture
def plan() -> Estimate:
    config = load_config(recipe_path("gsm8k-1gpu"), ["model.path=Qwen2.5-0.5B"])
    return estimate_for(config, "H200", Assumed(response=300, prompt=100, keep=0.7))[0]


def table(path: Path) -> dict[str, float]:
    return {row["rate"]: row["value"] for row in json.loads(path.read_text(encoding="utf-8"))}


def with_rates(plan: Estimate, values: dict[str, float]) -> Estimate:
    return replace(plan, measured=[row | {"value": values[row["rate"]]} for row in plan.measured])


def test_of_a_run_that_went_as_planned_with_other_rates_those_are_found(tmp_path: Path, plan: Estimate) -> None:
    meant = plan.rates | {"update": 0.5, "sample": 1e-3, "rest": 2e-4, "sync": 0.1}
    run = with_rates(plan, meant)
    seconds, drawn = (
        run.seconds(),
        (run.rollout()[0] - with_rates(plan, meant | {"sample": 0.0}).rollout()[0]) / 0.016,
    )
    step = {
        **{f"time/{phase}": seconds[phase] for phase in ("rollout", "update", "sync", "rest")},
        **{"time/prepare": 0.0, "groups/drawn": drawn, "groups/keep_rate": 0.7, "tokens/trained": 400 * 2048},
        **{"response_length/mean": 300, "response_length/kept_mean": 300},
    }
    lines = [step | {"step": k, "time/update": seconds["update"] * (9 if k < 3 else 1)} for k in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(plan.config.model_dump(mode="json")))
    rates.main(["run", str(tmp_path), "--table", str(tmp_path / "rates.json")])
    found = table(tmp_path / "rates.json")
    assert found == pytest.approx({name: meant[name] for name in ("update", "sample", "sync", "rest")}, rel=0.03)


def test_the_table_holds_what_the_published_steps_give_and_other_cards_keep_theirs(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    other = {"card": "L4", "rate": "layer", "value": 1.0}
    file.write_text(json.dumps([other, other | {"card": "H200"}]))
    rates.main(["decode", str(Path(rates.__file__).with_name("decode_points.json")), "--table", str(file)])
    rows = json.loads(file.read_text(encoding="utf-8"))
    assert rows[0] == other and [row["card"] for row in rows[1:]] == 3 * ["H200"]
    published = {row["rate"]: row["value"] for row in rates_for("H200")}
    assert {row["rate"]: row["value"] for row in rows[1:]} == {
        name: published[name] for name in ("layer", "bandwidth", "matmul")
    }
