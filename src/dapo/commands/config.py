"""``dapo config``: the resolved recipe, with what there is to know of each key."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dapo.commands.shared.options import AsJson, Overrides, is_setting
from dapo.commands.shared.output import print_json, print_lines

if TYPE_CHECKING:
    from dapo.config import Config
    from dapo.config.reference import Key

_WIDTH = 110


def config(
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="YAML file that describes a run. None: the defaults.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show a recipe as it is understood: every key with its value, meaning and default.

    What is printed is itself a recipe. Without RECIPE: the defaults, to start a recipe from.
    """
    from dapo.config.reference import keys_in
    from dapo.config.secrets import redact

    resolved, open_keys = _resolve(recipe, overrides or [])
    values: dict[str, Any] = redact(resolved.model_dump(mode="json"))
    for name in open_keys:
        section, _, last = name.rpartition(".")
        values[section][last] = None
    reference = keys_in(resolved)
    if as_json:
        print_json(dict(_as_json(values, reference)))
    else:
        print_lines(_document(values, reference))


def _resolve(recipe: str | None, overrides: Sequence[str]) -> tuple[Config, list[str]]:
    from dapo.config import load_config
    from dapo.config.reading import config_of_overrides

    if recipe is not None and is_setting(recipe):
        return config_of_overrides([recipe, *overrides])
    return config_of_overrides(overrides) if recipe is None else (load_config(recipe, overrides), [])


def _document(values: Mapping[str, Any], reference: Mapping[str, Key], prefix: str = "") -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, value in values.items():
        if (key := reference.get(prefix + name)) is None:
            yield from [f"{indent}{name}:"] if prefix else ["", f"{name}:"]
            yield from _document(value, reference, f"{prefix}{name}.")
            continue
        facts = f"({key.type}; {'required' if key.required else f'default {_yaml(key.default)}'})"
        for line in textwrap.wrap(f"{key.text} {facts}", _WIDTH - len(indent), break_long_words=False):
            yield f"{indent}# {line}"
        remark = "" if key.required or json.dumps(value) == json.dumps(key.default) else "  # changed"
        if key.required and value is None:
            remark = "  # to be filled in"
        yield f"{indent}{name}: {_yaml(value)}{remark}"


def _yaml(value: Any) -> str:
    import yaml

    class OneLine(yaml.SafeDumper):
        """Writes text with line ends in double quotes, where they are escapes."""

    def text(dumper: OneLine, data: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=None if data.isprintable() else '"')

    OneLine.add_representer(str, text)
    OneLine.add_representer(tuple, lambda dumper, data: dumper.represent_list(data))
    dumped = yaml.dump(
        value, Dumper=OneLine, default_flow_style=True, allow_unicode=True, sort_keys=False, width=float("inf")
    )
    return str(dumped).removesuffix("\n").removesuffix("\n...")


def _as_json(
    values: Mapping[str, Any], reference: Mapping[str, Key], prefix: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each dotted key an object: value, default, type, choices, meaning."""
    for name, value in values.items():
        if (key := reference.get(prefix + name)) is None:
            yield from _as_json(value, reference, f"{prefix}{name}.")
            continue
        default = None if key.required else key.default
        told = {"value": value, "default": default, "required": key.required, "type": key.type}
        yield key.name, told | {"choices": list(key.choices), "meaning": key.text}
