"""Messages: what is wrong with a recipe, where, and which key was probably meant."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from dapo.config.composed_reward import REWARD_KINDS
from dapo.config.section import Problems, section_types
from dapo.config.tree import Config
from dapo.errors import ConfigError, shortened

Tree = TypeVar("Tree", bound=BaseModel)

_SWITCHED_BY = {
    "model.lora": ("rank", "0", "16"),
    "algorithm.kl": ("mode", "off", "loss"),
    "algorithm.correction": ("kind", "none", "truncate"),
}
"""Sections without ``enable`` for which true or false may be given: the key that does it, with its value for each."""


def build_tree(root: type[Tree], tree: Mapping[str, Any], source: str, where: Mapping[str, str] | None = None) -> Tree:
    """Check a nested mapping and turn it into a ``root``.
    ``source``: what to call the whole in messages. ``where``: for dotted keys, the place to name in messages.
    Raises ConfigError: with every problem found."""
    try:
        return root.model_validate(tree)
    except ValidationError as error:
        problems = [line for item in error.errors() for line in explain(item, source, where or {}, root)]
        raise ConfigError("\n".join(problems)) from None


def explain(item: Any, source: str, where: Mapping[str, str], root: type[BaseModel] = Config) -> Iterator[str]:
    path, kind = _without_tags([str(p) for p in item["loc"]])
    key = ".".join(path)
    if item["type"] == "value_error" and isinstance(item["ctx"]["error"], Problems):
        for line in item["ctx"]["error"].lines:
            whole = ".".join([*path, line])
            yield f"{_place(whole.partition(':')[0], source, where)}: {whole}"
        return
    place = _place(key, source, where)
    if item["type"] == "extra_forbidden":
        key = key if kind else _given(key, where)
        if kind and _kinds_with(path[-1]):
            of = f"{'.'.join(path[:-1])}.kind={kind}"
            yield f"{place}: {key}: not a key of {of}; it belongs to {', '.join(_kinds_with(path[-1]))}"
        else:
            advice = _nearest_in(list(REWARD_KINDS[kind].model_fields), path) if kind else nearest_key(key, root)
            section = ".".join(path)
            known = {} if kind else dict(_elsewhere(section, item["input"]))
            if key != section:  # a key in it was given, and that one is told
                known.pop(section, None)
            for name, answer in ({key: advice} | known).items():
                yield f"{_place(name, source, where)}: {name}: unknown key; {answer}"
    elif item["type"] == "missing":
        yield f"{place}: {key}: required but not given"
    elif item["type"] == "union_tag_invalid":
        place = _place(f"{key}.kind", source, where)
        yield f"{place}: {key}.kind: {_shown(item['input'].get('kind'))} is not one of {_kinds_at(path)}"
    elif item["type"] == "union_tag_not_found":
        yield f"{place}: {key}.kind: required but not given; one of {_kinds_at(path)}"
    elif item["type"] in ("model_type", "dict_type", "model_attributes_type"):
        name, *values = _SWITCHED_BY.get(key, ("",))
        use = f"; use {key}.{name}={values[item['input']]}" if values and isinstance(item["input"], bool) else ""
        yield f"{place}: {key}: is a section with keys of its own, got {_shown(item['input'])}{use}"
    else:
        hint = "put text that YAML reads as something else in quotes" if item["type"] == "string_type" else ""
        given = _shown(item["input"])
        hint = ELSEWHERE.get(f"{key}={given.lower()}".replace("'", ""), hint)
        yield f"{place}: {key}: {item['msg'].removeprefix('Value error, ')}, got {given}{hint and f'; {hint}'}"


def _without_tags(path: list[str]) -> tuple[list[str], str | None]:
    """The keys of a path into which pydantic put the kind of each reward after the key that holds it, a mark before a
    bad key and each type that a value may have, and the kind of the reward that the last key stands in."""
    keys: list[str] = []
    kinds: list[str | None] = []  # of the section that each key stands in
    kind = None
    for name in path:
        if name in ("[key]", "bool", "constrained-float") or name.startswith(("list[", "literal[")):
            continue
        if keys and keys[-1] in ("reward", "check") and name in REWARD_KINDS and kind is None:
            kind = name
        else:
            keys.append(name)
            kinds.append(kind)
            kind = None
    return keys, kinds[-1] if kinds else None


def _kinds_at(path: Sequence[str]) -> str:
    """The kinds that a reward may have here: a part is not put together from others."""
    inside = len(path) > 1 and "parts" in path
    return ", ".join(sorted(kind for kind in REWARD_KINDS if not (inside and kind == "compose")))


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python will print
        return f"a huge {type(value).__name__}"
    return shortened(re.sub(r"//[^/@'\s]*@", "//...@", text), 100)  # without the password of an address


def _kinds_with(key: str) -> list[str]:
    return [kind for kind, section in REWARD_KINDS.items() if key in section.model_fields]


def _given(key: str, where: Mapping[str, str]) -> str:
    """The key, or one below it: an override of ``training.steps.x`` makes a mapping of ``training.steps``."""
    return key if key in where else next((one for one in where if one.startswith(f"{key}.")), key)


def _place(key: str, source: str, where: Mapping[str, str]) -> str:
    """Of the key, of one below it or of the section that it is in."""
    key = _given(key, where)
    while key:
        if key in where:
            return where[key]
        key = key.rpartition(".")[0]
    return source


_ANSWERS: Mapping[str, str] = json.loads(Path(__file__).with_name("elsewhere.json").read_text(encoding="utf-8"))
ELSEWHERE = {
    word: answer if answer.startswith("not ") else f"did you mean {answer}?"
    for answer, words in _ANSWERS.items()
    for word in words.split()
}
"""What to say of other systems' names for keys, sections and values (docs/coming-from.md) and of words that people try,
which similar names would miss. A word with dots is the end of a key."""


def _elsewhere(key: str, value: Any = None) -> Iterator[tuple[str, str]]:
    """What to say of an unknown key and, if it is a section, of the keys in it: of those that ELSEWHERE knows."""
    path = key.split(".")
    absent = [p for p in path[:-1] if ELSEWHERE.get(p, "").startswith(("not needed", "not there:"))]
    ends = (".".join(path[k:]) for k in range(len(path)))
    words = (*absent, f"{path[-1]}={value}", *ends)
    yield from [(key, ELSEWHERE[word]) for word in words if word in ELSEWHERE][:1]
    for name, inner in value.items() if isinstance(value, Mapping) else ():
        yield from _elsewhere(f"{key}.{name}", inner)


def nearest_key(key: str, root: type[BaseModel] = Config) -> str:
    """What to say of an unknown key of a tree: what another system's name is here; else the one key of its section that
    begins with it; else the same name in another section; else a similar one in its own, or a very similar one in
    another."""
    *parents, last = key.split(".")
    siblings = {name: ".".join([*parents, name]) for name in fields_at(parents, root)}
    for _, answer in _elsewhere(key):
        return answer
    if not siblings:  # the section is unknown too
        if last in root.model_fields:
            return f"did you mean {last}?"
        said = nearest_key(".".join(parents), root)
        meant = re.split("[ =?]", said.removeprefix("did you mean "))[0]
        named = [key for key in all_keys(root) if key.rpartition(".")[2] == last]
        if last in fields_at(meant.split("."), root):
            return f"did you mean {meant}.{last}?"
        return f"did you mean {named[0]}?" if said.startswith("did you mean") and len(named) == 1 else said
    if parents and len(longer := [name for name in siblings if name.startswith(f"{last}_")]) == 1:
        return f"did you mean {siblings[longer[0]]}?"
    known = all_keys(root)
    own_name = bool(parents) and ".".join(parents) not in known  # below a name that the user gave
    by_depth = sorted(known, key=lambda k: k.count("."))  # of two of one name the plainer is meant
    everywhere = {k.rpartition(".")[2]: k for k in reversed(by_depth) if not own_name}
    for names, cutoff in ((everywhere, 1.0), (siblings, 0.6 if parents else 0.75), (everywhere, 0.85)):
        for near in difflib.get_close_matches(last, names, n=1, cutoff=cutoff):
            return f"did you mean {names[near]}?"
    return f"valid here: {', '.join(siblings)}"


def _nearest_in(names: Sequence[str], path: Sequence[str]) -> str:
    for _, answer in _elsewhere(".".join(path)):
        return answer
    near = difflib.get_close_matches(path[-1], names, n=1, cutoff=0.6)
    return f"did you mean {'.'.join([*path[:-1], near[0]])}?" if near else f"valid here: {', '.join(names)}"


def fields_at(path: Sequence[str], root: type[BaseModel] = Config) -> list[str]:
    """The keys of the section (of any of its kinds) at ``path``, in which users' own names stand for mappings' keys."""
    sections: list[type[BaseModel]] = [root]
    named = False
    for name in path:
        if named:  # a key of a mapping of sections: whatever it is
            named = False
            continue
        found = [s.model_fields[name].annotation for s in sections if name in s.model_fields]
        named = any(get_origin(annotation) is dict for annotation in found)
        inner = [get_args(a)[1] if get_origin(a) is dict else a for a in found]
        sections = [kind for annotation in inner for kind in section_types(annotation)]
    return list(dict.fromkeys(name for section in sections for name in section.model_fields))


def all_keys(root: type[BaseModel] = Config) -> list[str]:
    """Every dotted key of the tree, sections included, in order."""
    return list(dict.fromkeys(_keys(root, "")))


def _keys(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, info in section.model_fields.items():
        yield prefix + name
        for kind in section_types(info.annotation):
            yield from _keys(kind, f"{prefix}{name}.")
