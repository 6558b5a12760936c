"""What there is to know of each key: type, default, choices and meaning. The configuration page and ``dapo config``
read it from here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dapo.config.reward import RewardBase
from dapo.config.section import OneOf, leaf_types, section_types
from dapo.config.tree import Config

_TYPES = {int: "integer", float: "number", str: "text", bool: "true or false", Any: "anything", date: "date"}
_BOUNDS = ((Ge, "ge", ">="), (Gt, "gt", ">"), (Le, "le", "<="), (Lt, "lt", "<"))


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the tree that holds a value.

    ``type`` is said in words, bounds included; ``choices`` are the values allowed, if they can be listed; ``default``
    means nothing where ``required``."""

    name: str
    type: str
    choices: tuple[Any, ...]
    default: Any
    required: bool
    text: str


def keys_of(section: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """The keys of a section and of those inside it, in order.
    ``section``: a class of the tree. Where a section is one of several kinds, the keys of all of them are given.
    ``prefix``: what to put before each name, final dot included."""
    for name, info in section.model_fields.items():
        kinds = section_types(info.annotation)
        for kind in kinds:
            yield from keys_of(kind, f"{prefix}{name}.")
        if not kinds:
            yield key_of(f"{prefix}{name}", info)


def key_of(name: str, info: FieldInfo) -> Key:
    return Key(
        name=name,
        type=_type_in_words(info.annotation, list(info.metadata)),
        choices=_choices(info.annotation, list(info.metadata)),
        default=info.get_default(call_default_factory=True, validated_data={}),
        required=info.is_required(),
        text=re.sub(r"\s+", " ", info.description or ""),
    )


def keys_in(section: BaseModel, prefix: str = "") -> dict[str, Key]:
    """The keys of this very tree, by name: of a section that is one of several kinds those of its kind."""
    found: dict[str, Key] = {}
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            found |= keys_in(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = key_of(prefix + name, info)
    return found


def all_values() -> dict[str, list[Key]]:
    found: dict[str, list[Key]] = {}
    for key in keys_of(Config):
        found.setdefault(key.name, []).append(key)
    return found


def _choices(annotation: Any, metadata: list[Any]) -> tuple[Any, ...]:
    """All values, or those that need no file of the user's."""
    leaves = leaf_types(annotation)
    if own := _own(metadata):
        return own.names
    if get_origin(annotation) is Literal:
        return tuple(leaves)
    return (True, False) if leaves == [bool] else ()


def _own(metadata: list[Any]) -> OneOf | None:
    return next((m.func for m in metadata if isinstance(getattr(m, "func", None), OneOf)), None)


def _type_in_words(annotation: Any, metadata: list[Any]) -> str:
    if get_origin(annotation) is Annotated:
        return _type_in_words(get_args(annotation)[0], [*metadata, *annotation.__metadata__])
    leaves = leaf_types(annotation)
    if own := _own(metadata):
        return f"one of {own}"
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(map(str, leaves))}" if len(leaves) > 1 else str(leaves[0])
    if any(isinstance(leaf, type) and issubclass(leaf, RewardBase) for leaf in leaves):
        return "like the section reward, or null"
    words = " or ".join(_leaf_in_words(leaf) for leaf in leaves if leaf is not NoneType)
    limits = [f"{said} {getattr(m, field)}" for m in metadata for kind, field, said in _BOUNDS if type(m) is kind]
    bounded = " ".join([words, " and ".join(limits)]).strip()
    if NoneType not in leaves:
        return bounded
    return f"{bounded}, or null" if limits else f"{bounded} or null"


def _leaf_in_words(leaf: Any) -> str:
    inner = get_args(leaf)
    if get_origin(leaf) is list:
        return f"list of {_type_in_words(inner[0], []).removeprefix('one of ').replace(', ', ' or ')}"
    if get_origin(leaf) is tuple:
        return f"list: {', '.join(_type_in_words(kind, []) for kind in inner)}"
    if section_types(leaf):
        return "items"
    if leaf is dict or get_origin(leaf) is dict:
        return "mapping"
    return _TYPES.get(leaf, str(leaf))  # what is left are literal values
