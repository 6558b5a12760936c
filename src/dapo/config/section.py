"""What every section of the tree is: immutable, closed to unknown keys, and read as the YAML was meant."""

from __future__ import annotations

import math
import os
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

LONGEST_NAME = 255
"""Bytes between two slashes that file systems take."""


def _short_enough(text: str) -> str:
    longest = max(len(part.encode(errors="replace")) for part in text.split("/"))
    if longest > LONGEST_NAME:
        raise ValueError(f"is too long for a name: {longest} bytes without a slash, and at most {LONGEST_NAME} can be")
    return text


PathText = Annotated[str, AfterValidator(_short_enough), AfterValidator(os.path.expanduser)]
"""Name of a file or folder, or of something on the hub. A leading ``~`` is the home folder."""


@dataclass(frozen=True, slots=True)
class OneOf:
    """Checks text that is one of ``names``, or names a function of the user's."""

    names: tuple[str, ...]

    def __call__(self, value: str) -> str:
        place, _, name = value.rpartition(":")
        if value in self.names or (place and name):
            return value
        if value.endswith(".py"):
            raise ValueError(f"names a file; name the function in it, too: {value}:NAME")
        raise ValueError(f"can be {self}")

    def __str__(self) -> str:
        return ", ".join([*self.names, "file.py:name or package.module:name"])


Named = Annotated[PathText, AfterValidator(OneOf(()))]
"""A function or class of the user's."""


def check_address(url: str, example: str, key: str, *, query: bool = False) -> None:
    """``key``: of the recipe, which names the environment variable with a login. ``query``: whether it may hold one.
    Raises ValueError: it is no address, or holds a login, or a query that it may not hold."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")  # raises for what cannot be the name of a host
    except ValueError:
        is_address = False
    if not is_address:
        raise ValueError(f"must be the address of a server, such as {example}")
    if "@" in parts.netloc:
        raise ValueError(f"must hold no user and password; put a token into the environment and name it ({key})")
    if not query and ("?" in url or "#" in url):
        raise ValueError(f"must hold no query; put a key into the environment and name it ({key})")


class Problems(ValueError):
    """What is wrong with several keys of a section taken together: each as `key: what; what would work`, where the key
    counts from the section."""

    def __init__(self, *lines: str) -> None:
        self.lines = lines
        super().__init__("\n".join(lines))


class Section(BaseModel):
    """A part of the tree: immutable, and closed to keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    def problems(self) -> Iterator[str]:
        """What is wrong with its keys taken together, each as in :class:`Problems`."""
        return iter(())

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if problems := [*self.problems()]:
            raise Problems(*problems)
        return self

    @model_validator(mode="before")
    @classmethod
    def _as_yaml_means_it(cls, data: Any) -> Any:
        """Three traps of YAML: an empty section is null, `off` is false, and true would pass for the number 1. A
        section with ``enable`` may be given as true or false."""
        if not isinstance(data, dict):
            return data
        return {
            key: _meant(value, cls.model_fields[key].annotation) if key in cls.model_fields else value
            for key, value in data.items()
        }


def section_types(annotation: Any) -> list[type[BaseModel]]:
    """The sections that an annotation stands for. A list or mapping of sections, or one that may be left out, is a
    value like any other."""
    if get_origin(annotation) in (list, dict) or types.NoneType in get_args(annotation):
        return []
    if get_origin(annotation) is Annotated:
        return section_types(get_args(annotation)[0])
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [kind for arg in get_args(annotation) for kind in section_types(arg)]


def _meant(value: Any, annotation: Any) -> Any:
    if value is None and section_types(annotation):
        return {}
    if isinstance(value, bool):
        if any("enable" in kind.model_fields for kind in section_types(annotation)):
            return {"enable": value}
        leaves = leaf_types(annotation)
        if value is False and "off" in leaves:
            return "off"
        if bool not in leaves and (int in leaves or float in leaves):
            return str(value).lower()  # not a number, and refused as such
    return value


def leaf_types(annotation: Any) -> list[Any]:
    """The types and literal values that an annotation is made of, the element types of lists left out."""
    if get_origin(annotation) is Annotated:
        return leaf_types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType, Literal):
        return [leaf for arg in get_args(annotation) for leaf in leaf_types(arg)]
    return [annotation]


def not_json(value: Any, key: str = "") -> Iterator[str]:
    """What in ``value`` a run folder cannot hold: all but text, numbers, true, false, null, lists and mappings."""
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                yield f"{key}: the key {name!r} must be text; put it in quotes"
            yield from not_json(item, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from not_json(item, f"{key}[{place}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{key}: must be a finite number"
    elif isinstance(value, str) and not value.isprintable():
        try:
            value.encode()
        except UnicodeEncodeError:
            yield f"{key}: holds half of a letter, which cannot be written as UTF-8"
    elif not isinstance(value, str | int | float | None):
        yield f"{key}: holds a {type(value).__name__}, where text, a number, a list or a mapping can stand"


def _only_json(value: dict[str, Any]) -> dict[str, Any]:
    for problem in not_json(value):
        raise ValueError(problem)
    return value


JsonMapping = Annotated[dict[str, Any], AfterValidator(_only_json)]
"""What a run folder can hold."""
