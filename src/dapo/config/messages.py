"""Messages: what is wrong with a recipe, where, and which key was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from dapo.config.reward import REWARD_KINDS
from dapo.config.section import _section_types
from dapo.config.tree import Config


def _explain(item: Any, source: str, where: Mapping[str, str]) -> Iterator[str]:
    """One pydantic error as lines for a person."""
    path, kind = _without_tags([str(p) for p in item["loc"]])
    key = ".".join(path)
    if item["type"] == "value_error" and not path:
        for line in str(item["ctx"]["error"]).splitlines():
            found = line.partition(":")[0]
            yield f"{_place(found, source, where)}: {line}"
        return
    place = _place(key, source, where)
    if item["type"] == "extra_forbidden":
        if kind and key in all_keys():
            yield f"{place}: {key}: not a key of reward.kind={kind}; it belongs to {', '.join(_kinds_with(path[-1]))}"
        else:
            yield f"{place}: {key}: unknown key; {nearest_key(key)}"
    elif item["type"] == "missing":
        yield f"{place}: {key}: required but not given"
    elif item["type"] == "union_tag_invalid":
        kinds, place = ", ".join(sorted(REWARD_KINDS)), _place(f"{key}.kind", source, where)
        yield f"{place}: {key}.kind: {_shown(item['input'].get('kind'))} is not one of {kinds}"
    elif item["type"] in ("model_type", "dict_type", "model_attributes_type"):
        yield f"{place}: {key}: is a section with keys of its own, got {_shown(item['input'])}"
    else:
        hint = "; put text that YAML reads as something else in quotes" if item["type"] == "string_type" else ""
        yield f"{place}: {key}: {item['msg'].removeprefix('Value error, ')}, got {_shown(item['input'])}{hint}"


def _without_tags(path: list[str]) -> tuple[list[str], str | None]:
    """pydantic names the kind of a reward after the key that holds it: take it out of the path, and tell the last."""
    keys: list[str] = []
    kind = None
    for name in path:
        if keys and keys[-1] == "reward" and name in REWARD_KINDS:
            kind = name
            keys.append("")  # so that a key below that is named like a kind is not taken for one
        else:
            keys.append(name)
    return [key for key in keys if key], kind


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python will print
        return f"a huge {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:97]}..."


def _kinds_with(key: str) -> list[str]:
    return [kind for kind, section in REWARD_KINDS.items() if key in section.model_fields]


def _place(key: str, source: str, where: Mapping[str, str]) -> str:
    while key:
        if key in where:
            return where[key]
        key = key.rpartition(".")[0]
    return source


def nearest_key(key: str) -> str:
    """What to say of an unknown key: the same name elsewhere, else the most similar (in its section if possible)."""
    known = all_keys()
    *parents, last = key.split(".")
    elsewhere = [k for k in known if k.rpartition(".")[2] == last]
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    section = ".".join(parents)
    siblings = [k for k in known if k.rpartition(".")[0] == section]
    near = difflib.get_close_matches(last, [k.rpartition(".")[2] for k in siblings], n=1, cutoff=0.6)
    if near:
        return f"did you mean {section + '.' if section else ''}{near[0]}?"
    names = {k.rpartition(".")[2]: k for k in reversed(known)}
    near = difflib.get_close_matches(last, names, n=1, cutoff=0.6)
    if near:
        return f"did you mean {names[near[0]]}?"
    return f"valid here: {', '.join(k.rpartition('.')[2] for k in siblings)}"


def all_keys() -> list[str]:
    """Every dotted key of the tree, sections included, in order."""
    return list(dict.fromkeys(_keys(Config, "")))


def _keys(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, info in section.model_fields.items():
        yield prefix + name
        for kind in _section_types(info.annotation):
            yield from _keys(kind, f"{prefix}{name}.")
