"""Writes the reference pages that follow from the code: docs/configuration.md and docs/metrics.md.

usage: python scripts/make_docs.py        (a test fails when the pages are not what this would write)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_origin

from pydantic import BaseModel

from dapo.config import Config, stages
from dapo.config.reference import Key, key_of, keys_of
from dapo.config.section import section_types
from dapo.observe.metrics import METRICS

DOCS = Path(__file__).parents[1] / "docs"


def configuration() -> str:
    lines = [
        "# Configuration",
        "",
        "Every key of a recipe, with its default. Written by `scripts/make_docs.py` from the config tree; any of them",
        "can be set on the command line as `section.key=value`. A section with a key `enable` may be given as true or",
        "false (`filter_groups: false`).",
    ]
    for name, info in Config.model_fields.items():
        kinds = section_types(info.annotation)
        if not kinds:
            lines += ["", f"`{name}` (default `{info.default}`): {key_of(name, info).text}"]
        for kind in kinds:
            title = name if len(kinds) == 1 else f"{name} with `kind: {_kind(kind)}`"
            lines += [
                "",
                f"## {title}",
                "",
                "| key | default | meaning |",
                "|---|---|---|",
                *_rows(kind),
                *_parts(kind),
            ]
    lines += [
        "",
        "## Stages",
        "",
        "Recipes of `dapo sft`, `dapo dpo` and `dapo reward-model` (methods.md) have the sections",
    ]
    lines += [
        "`model`, `evaluation` (`data`, `every`, `rows`, `patience`, `min_improvement`), `runtime` and `run` as above,"
    ]
    lines += ["`seed`, and those below."]
    for title, kinds in STAGE_TABLES.items():
        rows = dict.fromkeys(row for kind in kinds for row in _rows(kind))
        lines += ["", f"### {title}", "", "| key | default | meaning |", "|---|---|---|", *rows]
    return "\n".join(lines) + "\n"


STAGE_TABLES = {
    "training of a stage": [stages.StageTraining],
    "data of sft": [stages.SFTData],
    "data of dpo": [stages.DPOData],
    "data of reward_model": [stages.RewardModelData],
    "dpo": [stages.DPOSection],
    "reward_model": [stages.RewardModelSection],
}


def _rows(section: type[BaseModel]) -> Iterator[str]:
    for key in keys_of(section):
        own = ["a function of yours (extending.md)"] if "file.py:name" in key.type else []
        values = [*(f"`{c}`" for c in key.choices), *own]
        choices = f" One of {', '.join(values)}." if len(values) > 1 else ""
        if key.choices == (True, False):
            choices = ""
        yield f"| `{key.name}` | {_default(key)} | {_cell(key.text)}{choices} |"


def _parts(section: type[BaseModel]) -> Iterator[str]:
    """The keys of a mapping of sections, under a name that the user gives."""
    for name, info in section.model_fields.items():
        if get_origin(info.annotation) is dict and (inner := section_types(get_args(info.annotation)[1])):
            yield from (row.replace("| `", f"| `{name}.NAME.", 1) for kind in inner for row in _rows(kind))


def _kind(section: type[BaseModel]) -> str:
    return str(get_args(section.model_fields["kind"].annotation)[0])


def _default(key: Key) -> str:
    if key.required:
        return "required"
    if key.default is None or isinstance(key.default, bool):
        return f"`{json.dumps(key.default)}`"
    return f"`{key.default}`" if key.default != "" else '`""`'


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def metrics() -> str:
    lines = [
        "# Metrics",
        "",
        "What `metrics.jsonl` holds, one object per rollout step. Written by `scripts/make_docs.py` from the registry",
        "in `observe/metrics.py`. A number that a step cannot have is null or left out.",
        "",
        "| name | unit | meaning |",
        "|---|---|---|",
        *(f"| `{m.name}` | {m.unit} | {_cell(m.meaning)} |" for m in METRICS.values()),
    ]
    return "\n".join(lines) + "\n"


PAGES = {"configuration.md": configuration, "metrics.md": metrics}

if __name__ == "__main__":
    for page, write in PAGES.items():
        (DOCS / page).write_text(write(), encoding="utf-8")
        print(f"docs/{page}")
