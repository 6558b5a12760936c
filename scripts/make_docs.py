"""Writes the reference pages that follow from the code: docs/configuration.md and docs/metrics.md.

usage: python scripts/make_docs.py        (a test fails when the pages are not what this would write)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dapo.config import Config, _section_types
from dapo.observe.metrics import METRICS

DOCS = Path(__file__).parents[1] / "docs"


def configuration() -> str:
    lines = [
        "# Configuration",
        "",
        "Every key of a recipe, with its default. Written by `scripts/make_docs.py` from the config tree; any of them",
        "can be set on the command line as `section.key=value`.",
    ]
    for name, info in Config.model_fields.items():
        kinds = _section_types(info.annotation)
        if not kinds:
            lines += ["", f"`{name}` (default `{info.default}`): {_text(info)}"]
        for kind in kinds:
            title = name if len(kinds) == 1 else f"{name} with `kind: {_kind(kind)}`"
            lines += ["", f"## {title}", "", "| key | default | meaning |", "|---|---|---|", *_rows(kind, "")]
    return "\n".join(lines) + "\n"


def _rows(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, info in section.model_fields.items():
        kinds = _section_types(info.annotation)
        if kinds:
            yield from _rows(kinds[0], f"{prefix}{name}.")
        else:
            yield f"| `{prefix}{name}` | {_default(info)} | {_text(info)}{_choices(info.annotation)} |"


def _kind(section: type[BaseModel]) -> str:
    return str(get_args(section.model_fields["kind"].annotation)[0])


def _default(info: FieldInfo) -> str:
    value: Any = info.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if value is None or isinstance(value, bool):
        return f"`{json.dumps(value)}`"
    return f"`{value}`" if value != "" else '`""`'


def _text(info: FieldInfo) -> str:
    return re.sub(r"\s+", " ", info.description or "").replace("|", "\\|")


def _choices(annotation: Any) -> str:
    if get_origin(annotation) is not Literal or len(get_args(annotation)) < 2:
        return ""
    return " One of " + ", ".join(f"`{choice}`" for choice in get_args(annotation)) + "."


def metrics() -> str:
    lines = [
        "# Metrics",
        "",
        "What `metrics.jsonl` holds, one object per rollout step. Written by `scripts/make_docs.py` from the registry",
        "in `observe/metrics.py`. A number that a step cannot have is null or left out.",
        "",
        "| name | unit | meaning |",
        "|---|---|---|",
        *(f"| `{m.name}` | {m.unit} | {m.meaning.replace('|', chr(92) + '|')} |" for m in METRICS.values()),
    ]
    return "\n".join(lines) + "\n"


PAGES = {"configuration.md": configuration, "metrics.md": metrics}

if __name__ == "__main__":
    for page, write in PAGES.items():
        (DOCS / page).write_text(write(), encoding="utf-8")
        print(f"docs/{page}")
