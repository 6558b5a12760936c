"""Distillation: what a ranker chooses from a policy's samples is taught to the policy, and how much of the gain stays.

Samples, scores them, writes rows for a stage, runs it as a phase (``stages/phases.py``), and measures policy, best-of-n
and the distilled policy on held-out prompts. Everything lies in one folder; what is there is not made again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from dapo.config import Config
from dapo.config.data import DataItem, WritingConfig
from dapo.config.reading import with_values
from dapo.data.parts import open_table
from dapo.data.rows import plain_value
from dapo.errors import ConfigError, DataError
from dapo.evaluation.statistics import Estimate, estimate_means, estimate_ratio
from dapo.inference.generate import generate_responses
from dapo.inference.model import load_prompting
from dapo.observe.progress import Listener
from dapo.ranking.calibrate import passing
from dapo.ranking.measures import best_of
from dapo.ranking.rows import Candidates, read_candidates
from dapo.ranking.score import Scored, best_first, score_rows
from dapo.reward.contract import Scorer
from dapo.stages.phases import load_phases, run_phases
from dapo.util.files import json_line, lines_of, read_json, write_atomic, write_json
from dapo.util.pages import Rows, Section, Text, as_markdown
from dapo.util.shutdown import Shutdown

PHASE = "distilled"
Load = Callable[[], Scorer]


@dataclass(frozen=True, slots=True)
class Plan:
    """``config``: the policy and how it samples. ``ranker``: its name. ``train``, ``heldout``: files of prompts.
    ``method``: sft or dpo. ``thresholds``: of a filter (SFT on all that pass), empty: the best sample of each prompt.
    ``stage``: keys of the method's recipe."""

    config: Config
    ranker: str
    train: Sequence[str]
    heldout: Sequence[str]
    folder: Path
    method: str = "sft"
    thresholds: Mapping[str, float] | None = None
    stage: Sequence[str] = ()


def distil(
    plan: Plan, ranker: Load, gold: Load | None, listener: Listener, shutdown: Shutdown, resume: bool = False
) -> dict[str, Any]:
    """Returns what ``report.json`` holds; ``report.md`` tells it to people.
    ``gold``: a reward that tells what is right, which the ranker did not see. ``resume``: go on in the folder.
    Raises UserError: a model, a row or a setting is wrong, or the ranker lets nothing through."""
    config = load_prompting(plan.config).config
    _claim(plan, config, resume)
    train, heldout = (
        _sampled(config, files, plan.folder / f"{name}.jsonl", listener)
        for name, files in (("train", plan.train), ("heldout", plan.heldout))
    )
    if shared := {row.prompt_text for row in train} & {row.prompt_text for row in heldout}:
        listener.warning(f"{len(shared)} held-out prompts are trained on, too: the gain on new prompts may be less")
    chosen = plan.folder / "rows.jsonl"
    if not chosen.is_file():  # a judge may choose others, which the run there has not been trained on
        listener.phase(f"ranking {sum(len(row.texts) for row in train)} samples of {len(train)} prompts")
        write_atomic(chosen, map(json_line, _chosen(plan, train, score_rows(ranker(), train))))
    rows = sum(1 for _ in lines_of(chosen))
    listener.phase(f"{rows} rows for {plan.method}")
    recipe = plan.folder / "recipe.yaml"
    write_json(recipe, _recipe(plan, config))  # JSON is YAML
    overrides = [f"phases.{PHASE}.{one}" for one in plan.stage]
    run_phases(*load_phases(recipe, overrides), listener, resume, shutdown)
    distilled = with_values(config, {"model.path": str(plan.folder / PHASE / "model-after")})
    after = _sampled(distilled, plan.heldout, plan.folder / "heldout-after.jsonl", listener)
    listener.phase("measuring on held-out prompts")
    judges = {"ranker": ranker} | ({"gold": gold} if gold else {})
    scores = {name: score_rows(judge(), [*heldout, *after]) for name, judge in judges.items()}
    count, lines = len(heldout), []
    found: dict[str, Any] = {"rows": rows, "prompts": count, "samples": config.evaluation.samples_per_prompt}
    for name, both in scores.items():
        told = _measured(both[:count], both[count:], scores["ranker"][:count])
        found[name] = {key: asdict(one) for key, one in told.items()}
        gain, kept = told.pop("gain"), told.pop("kept", None)
        share = kept.text(".0%") if kept else f"too little gain to speak of a share: {gain.text('.3f')}"
        lines.append([name, *(one.text(".3f") for one in told.values()), share])
    write_json(plan.folder / "report.json", found)
    said = f"{plan.method} on {rows} rows; measured on {count} held-out prompts."
    header = ["by", "one sample", "best of n", "distilled, one sample", "share of the gain kept"]
    sections = [Section("Gain", [Text(said), Rows(header, lines)])]
    write_atomic(plan.folder / "report.md", as_markdown(f"Distilled from the best of {found['samples']}", sections))
    return found


def _claim(plan: Plan, config: Config, resume: bool) -> None:
    """Raises ConfigError: the folder holds a distillation, and it is not to go on, or is another one."""
    file = plan.folder / "distil.json"
    sections = config.model_dump(mode="json", include={"model", "data", "evaluation", "seed"})
    files = {"train": list(plan.train), "heldout": list(plan.heldout)}
    how = {"ranker": plan.ranker, "method": plan.method, "thresholds": plan.thresholds, "stage": list(plan.stage)}
    told = {**sections, **files, **how}
    if not file.is_file():
        plan.folder.mkdir(parents=True, exist_ok=True)
        write_json(file, told)
    elif not resume:
        raise ConfigError(f"{plan.folder}: is there already; --resume goes on, or give another --dir")
    elif read_json(file) != told:
        raise ConfigError(f"{plan.folder}: holds a distillation with other settings; give another --dir")


def _sampled(config: Config, files: Sequence[str], place: Path, listener: Listener) -> list[Candidates]:
    """The rows of ``files``, each with samples as its candidates: from ``place``, or made and written there."""
    if not place.is_file():
        sampling = with_values(config, {"evaluation.data": [DataItem(path=file) for file in files]})
        texts = defaultdict[int, list[str]](list)
        generate_responses(sampling, (), listener, lambda one: texts[one.prompt_number - 1].append(one.text))
        tables = [open_table(DataItem(path=file)) for file in files]  # afterwards: what cannot be used was refused
        rows = (plain_value(table.raw(number)) for table in tables for number in range(len(table)))
        lines = ({**row, "candidates": texts[number]} for number, row in enumerate(rows))
        write_atomic(place, map(json_line, lines))
    return read_candidates([str(place)])


def _chosen(plan: Plan, rows: Sequence[Candidates], scored: Sequence[Sequence[Scored]]) -> list[dict[str, Any]]:
    """Raises DataError: there is none."""
    several = passing(rows, scored, plan.thresholds) if plan.thresholds else map(best_first, scored)
    kept = [[one for one in some if one.score is not None and one.text.strip()] for some in several]
    found = list[dict[str, Any]]()
    for row, some in zip(rows, kept, strict=True):
        if plan.method == "sft":
            learned = some if plan.thresholds else some[:1]
            found += [{"prompt": row.prompt, "response": one.text} for one in learned]
        elif some and some[0].score != some[-1].score:
            found.append({"prompt": row.prompt, "chosen": some[0].text, "rejected": some[-1].text})
    if not found:
        why = "the samples of each prompt have equal scores" if plan.method == "dpo" else "no sample has a score"
        why = "no sample passes the threshold" if plan.thresholds else why
        raise DataError(f"there is nothing to learn: {why}; take more samples, or another ranker or threshold")
    return found


def _recipe(plan: Plan, config: Config) -> dict[str, Any]:
    writing = config.data.model_dump(mode="json", include=set(WritingConfig.WRITING), exclude_defaults=True)
    phase = {
        "stage": plan.method,
        "model": config.model.model_dump(mode="json", exclude_defaults=True),
        "data": {**writing, "template": config.data.template, "train": str((plan.folder / "rows.jsonl").absolute())},
    }
    if plan.method == "dpo":
        phase["dpo"] = {"beta": 1.0, "nll": 5.0}  # without the NLL it leaves what it sampled, and games the ranker
    return {"dir": str(plan.folder), "phases": {PHASE: phase}}


def _measured(
    before: Sequence[Sequence[Scored]], after: Sequence[Sequence[Scored]], chosen_by: Sequence[Sequence[Scored]]
) -> dict[str, Estimate]:
    """Mean scores of one sample, of the best of n by ``chosen_by``, and of the distilled policy; what best-of-n gains
    over one sample, and which share of it the distilled policy has. Where the interval of the gain reaches 0 there is
    no share: it could be any number (Fieller 1954)."""
    columns = list[list[float]]()
    for worth, new, chosen in zip(before, after, chosen_by, strict=True):
        usable = [(a.score, b.score) for a, b in zip(chosen, worth, strict=True) if None not in (a.score, b.score)]
        distilled = [one.score for one in new if one.score is not None]
        if usable and distilled:
            scores, values = zip(*usable, strict=True)
            columns.append([fmean(values), best_of(scores, values, len(values)), fmean(distilled)])
    if not columns:
        raise DataError("no held-out prompt has samples with scores, so the gain cannot be measured")
    single, best, distilled_one = np.array(columns).T
    table = np.stack([single, best, distilled_one, best - single], axis=1)
    names = ("one_sample", "best_of_n", "distilled", "gain")
    found = dict(zip(names, estimate_means(table, [False] * 4), strict=True))
    gain = found["gain"]
    if (gain.value if gain.low is None else gain.low) > 0:
        found["kept"] = estimate_ratio(distilled_one - single, best - single)
    return found
