"""``dapo config``: the resolved recipe, with what there is to know of each key."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dapo.commands.shared.errors import errors_for_people
from dapo.commands.shared.options import Debug, Overrides, is_setting
from dapo.commands.shared.output import print_json, show_yaml
from dapo.errors import ConfigError

if TYPE_CHECKING:
    from dapo.config import Config
    from dapo.config.reference import Key

_WIDTH = 110


def config(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE]",
            help="YAML file that describes a run. None: the defaults.",
        ),
    ] = None,
    overrides: Overrides = None,
    key: Annotated[str | None, typer.Option(help="Show this section or key only.")] = None,
    docs: Annotated[bool, typer.Option(help="Say what each key means, as comments.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Show a recipe as it is understood: every key with its value, meaning and default.

    What is printed is itself a recipe. Without RECIPE: the defaults, to start a recipe from.
    """
    from dapo.config.reference import keys_in
    from dapo.config.secrets import redact

    with errors_for_people(debug):
        resolved, open_keys = _resolve(recipe, overrides or [])
        values: dict[str, Any] = redact(resolved.model_dump(mode="json"))
        for name in open_keys:
            section, _, last = name.rpartition(".")
            values[section][last] = None
        if key is not None:
            values = _restricted(values, key, resolved)
        reference = keys_in(resolved)
        if as_json:
            print_json(_as_json(values, reference, docs))
        else:
            show_yaml("\n".join(_document(values, reference, docs)))


def _resolve(recipe: str | None, overrides: Sequence[str]) -> tuple[Config, list[str]]:
    from dapo.config import load_config
    from dapo.config.reading import config_of_overrides

    if recipe is not None and is_setting(recipe):
        return config_of_overrides([recipe, *overrides])
    return config_of_overrides(overrides) if recipe is None else (load_config(recipe, overrides), [])


def _restricted(values: Mapping[str, Any], key: str, config: Config) -> dict[str, Any]:
    """``values`` with the branch of ``key`` only. Raises ConfigError if there is none."""
    from dapo.config import all_keys
    from dapo.config.messages import nearest_key

    found: Any = values
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            if key in all_keys():
                raise ConfigError(f"--key {key}: not a key of reward.kind={config.reward.kind}; set reward.kind")
            raise ConfigError(f"--key {key}: unknown key; {nearest_key(key)}")
        found = found[part]
    for part in reversed(key.split(".")):
        found = {part: found}
    branch: dict[str, Any] = found
    return branch


def _document(values: Mapping[str, Any], reference: Mapping[str, Key], docs: bool, prefix: str = "") -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, value in values.items():
        full = prefix + name
        if full in reference:
            yield from _entry(full, value, reference[full], docs, indent)
            continue
        if docs and not prefix:
            yield ""
        plain = not docs and prefix and all(f"{full}.{key}" in reference for key in value)
        if plain and not any(_remark(each, reference[f"{full}.{key}"], docs) for key, each in value.items()):
            yield f"{indent}{name}: {_yaml(value)}"  # nothing to say of any of its keys
            continue
        yield f"{indent}{name}:"
        yield from _document(value, reference, docs, f"{full}.")


def _entry(name: str, value: Any, key: Key, docs: bool, indent: str) -> Iterator[str]:
    if docs:
        facts = f"({key.type}; {'required' if key.required else f'default {_yaml(key.default)}'})"
        for line in textwrap.wrap(f"{key.text} {facts}", _WIDTH - len(indent), break_long_words=False):
            yield f"{indent}# {line}"
    yield f"{indent}{key.last}: {_yaml(value)}{_remark(value, key, docs)}"


def _remark(value: Any, key: Key, docs: bool) -> str:
    """What stands behind a value: that it is still to be given, or is not the default."""
    if key.required:
        return "  # to be filled in" if value is None else ""
    if json.dumps(value) == json.dumps(key.default):
        return ""
    return "  # changed" if docs else f"  # changed; default {_yaml(key.default)}"


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


def _as_json(values: Mapping[str, Any], reference: Mapping[str, Key], docs: bool, prefix: str = "") -> dict[str, Any]:
    """The values as a tree, or with ``docs`` an object for each dotted key: value, default, type, choices, meaning."""
    if not docs:
        return dict(values)
    found: dict[str, Any] = {}
    for name, value in values.items():
        full = prefix + name
        if full not in reference:
            found |= _as_json(value, reference, docs, f"{full}.")
            continue
        key = reference[full]
        found[full] = {
            "value": value,
            "default": None if key.required else key.default,
            "required": key.required,
            "type": key.type,
            "choices": list(key.choices),
            "meaning": key.text,
        }
    return found
