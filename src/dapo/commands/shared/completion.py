"""What the shell completes: recipes, run folders, keys of the config and their values. Loads nothing heavy.

A key that is the only one left comes with its values (``algorithm.kl.mode=off``, ``=loss``, ...), so that the shell
puts no space behind ``=``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from dapo.config.reference import Key

_DEPTH, _MOST_FILES = 3, 5000
"""How many folders below what was typed are looked into, and how many files are looked at."""

Completions = list[tuple[str, str]]
"""Words, each with what to say of it."""


def complete_recipe(incomplete: str) -> Completions:
    from dapo.config.plan import shipped_recipes

    shipped = [(path.stem, "") for path in shipped_recipes() if incomplete and path.stem.startswith(incomplete)]
    return shipped + [(path, "") for path in _below(incomplete, "*.yaml", "*.yml") if "/checkpoints/" not in path]


def complete_run(incomplete: str) -> Completions:
    folders = [Path(path).parent for path in _below(incomplete, "config.yaml")]
    return [(str(one), "") for one in folders if any((one / n).exists() for n in ("metrics.jsonl", "environment.json"))]


def complete_override(context: typer.Context, incomplete: str) -> Completions:
    """``section.key=``, or its values once the key is plain."""
    words: list[str] = ["", "", *(context.params.get("overrides") or [])]
    before, last = words[-2:]
    if last == "=":  # bash takes a word apart at "=", and asks for the value alone
        key = _by_name().get(before)
        return [(value, "") for value in _values(key)] if key is not None else []
    return _overrides(incomplete)


def complete_key(incomplete: str) -> Completions:
    from dapo.config import all_keys

    meanings = _by_name()
    return [
        (name, meanings[name].text if name in meanings else "section")
        for name in all_keys()
        if name.startswith(incomplete)
    ]


def complete_metric(incomplete: str) -> Completions:
    from dapo.observe.metrics import METRICS

    return _after_comma(incomplete, {m.name: m.meaning for m in METRICS.values() if "{" not in m.name})


def complete_status(incomplete: str) -> Completions:
    from dapo.observe.samples import STATUSES

    return _after_comma(incomplete, STATUSES)


def _after_comma(incomplete: str, known: Mapping[str, str]) -> Completions:
    """A list's last word."""
    done, comma, name = incomplete.rpartition(",")
    return [(f"{done}{comma}{one}", meaning) for one, meaning in known.items() if one.startswith(name)]


def _overrides(incomplete: str) -> Completions:
    name, equals, value = incomplete.partition("=")
    found = [key for key in _by_name().values() if (key.name == name if equals else key.name.startswith(name))]
    if len(found) > 1:
        return [(f"{key.name}=", key.text) for key in found]
    return [(f"{key.name}={v}", "") for key in found for v in ("", *_values(key)) if v.startswith(value)]


def _values(key: Key) -> list[str]:
    values = key.choices or (() if key.required else (key.default,))
    return [v if isinstance(v, str) else json.dumps(v, separators=(",", ":")) for v in values if v != ""]


def _by_name() -> dict[str, Key]:
    from dapo.config import Config
    from dapo.config.reference import keys_of

    return {key.name: key for key in keys_of(Config)}


def _below(incomplete: str, *patterns: str) -> list[str]:
    """Files whose path begins with what was typed, at most :data:`_DEPTH` folders below it; hidden folders left out."""
    folder, _, _ = incomplete.rpartition("/")
    root = Path(folder or ("/" if incomplete.startswith("/") else "."))
    found = [
        path for path in islice(_walk(root, _DEPTH), _MOST_FILES) if any(path.match(pattern) for pattern in patterns)
    ]
    return sorted(str(path) for path in found if str(path).startswith(incomplete))


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.is_dir():
            if depth and not entry.name.startswith("."):
                yield from _walk(entry, depth - 1)
        else:
            yield entry
