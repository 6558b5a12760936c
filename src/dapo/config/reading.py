"""Reading: from a recipe in YAML with overrides, or from a mapping, to a checked tree."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from dapo.config.composed_reward import REWARD_KINDS, RewardConfig, changed_each
from dapo.config.data import DataItem
from dapo.config.messages import build_tree, fields_at
from dapo.config.on_resume import without_gone
from dapo.config.plan import existing_recipe, name_run_folder, shipped_recipes
from dapo.config.secrets import require_secrets
from dapo.config.tree import Config
from dapo.errors import ConfigError
from dapo.util.files import read_text

Tree = TypeVar("Tree", bound=BaseModel)


def load_config(recipe: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe and apply overrides of the form ``section.key=value`` (the value is YAML).

    ``recipe``: a file, or the name of a recipe that comes with the package, such as ``cpu-demo``. Relative data files
    and a reward function's file are resolved beside the recipe if they exist there.
    Raises ConfigError: with every problem found, each with file, line and key."""
    tree, where = read_recipe(path := existing_recipe(recipe), overrides)
    _require_run(tree, path)
    name_run_folder(tree, path)
    return beside(build_config(tree, str(path), where, path), path.parent)


def _require_run(tree: Mapping[str, Any], path: Path) -> None:
    """Raises ConfigError: it is the recipe of a stage or of phases."""
    if isinstance(stage := "phases" if "phases" in tree else tree.get("stage"), str):
        command = f"dapo {stage.replace('_', '-')}"
        raise ConfigError(f"{path}: is a recipe of {command}; what would work: {command} {path}")


def load_reward(recipe_or_kind: str | Path, overrides: Sequence[str] = ()) -> RewardConfig:
    """The reward alone: the section of a recipe, of which nothing else need be there, or a kind with its defaults.
    ``recipe_or_kind``: a recipe, or a kind such as ``math``; a file of that name goes first. ``overrides``:
    ``reward.key=value``.
    Raises ConfigError: with every problem found, each with file, line and key."""
    path, name = Path(recipe_or_kind), str(recipe_or_kind)
    for override in overrides:
        if not override.strip().startswith("reward"):
            raise ConfigError(f"override {override!r}: only keys of the reward can be changed here: reward.key=value")
    if name in REWARD_KINDS and not os.path.isfile(path):  # noqa: PTH113
        tree: dict[str, Any] = {"reward": {"kind": name}}
        source, where = f"reward {name}", dict[str, str]()
        apply_overrides(tree, overrides, where)
    elif os.path.exists(path):  # noqa: PTH110
        found, where = read_recipe(path, overrides)
        _require_run(found, path)
        source = name
        tree = {key: value for key, value in found.items() if key == "reward" or key not in Config.model_fields}
    else:
        kinds = ", ".join(sorted(REWARD_KINDS))
        raise ConfigError(f"{name}: there is no such recipe, and no such kind of reward; the kinds are {kinds}")
    reward: RewardConfig = _reward_beside(
        build_config(_NO_RUN | {"model": {"path": name}} | tree, source, where).reward, path.parent
    )
    remedy = "as reward.key=value, or name the recipe that the run came from"
    require_secrets(reward.model_dump(mode="json"), name, remedy, "reward")
    return reward


def config_of_overrides(overrides: Sequence[str]) -> tuple[Config, list[str]]:
    """The defaults with ``overrides``, and the required keys for which nothing was given (they hold a placeholder).
    Raises ConfigError: with every problem found."""
    tree: dict[str, Any] = {}
    where: dict[str, str] = {}
    apply_overrides(tree, overrides, where)
    missing = []
    for section, key in (("model", "path"), ("reward", "function")):
        values = tree.setdefault(section, {}) or {}
        if not isinstance(values, dict) or values.get(key) is not None:
            continue
        if section == "model" or values.get("kind") == "function":
            tree[section] = values | {key: "(required)"}
            missing.append(f"{section}.{key}")
    return build_config(tree, "config", where), missing


def layered_config(
    layers: Iterable[Mapping[str, Any]], overrides: Sequence[str] = (), where: Mapping[str, str] | None = None
) -> Config:
    """The tree that ``layers`` (nested mappings, the last one counts most) and then ``overrides`` make. ``where``: for
    dotted keys, the place to name in messages, such as an option of the command line.
    Raises ConfigError: with every problem found."""
    places = dict(where or {})
    last: dict[str, Any] = {}
    apply_overrides(last, overrides, places)
    tree: dict[str, Any] = {}
    for layer in (*layers, last):
        tree = merged(tree, layer)
    return build_config(tree, "settings", places)


def merged(tree: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """``tree`` with the keys of ``layer`` in place of its own, section by section.

    A layer that names another ``kind`` replaces the section: the keys of one kind mean nothing to another."""
    found = dict(tree)
    for key, value in layer.items():
        present = found.get(key)
        if isinstance(present, Mapping) and isinstance(value, Mapping):
            other_kind = "kind" in value and "kind" in present and value["kind"] != present["kind"]
            found[key] = dict(value) if other_kind else merged(present, value)
        else:
            found[key] = value
    return found


def build_config(
    tree: Mapping[str, Any], source: str = "config", where: Mapping[str, str] | None = None, file: Path | None = None
) -> Config:
    """Check a nested mapping and turn it into a :class:`Config`, as :func:`build_tree` does. ``file``: that it was read
    from; of a run, keys that are gone since may be there where they hold nothing."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        left = tree if file is None else without_gone(tree, error, file, where or {})
    return build_tree(Config, left, source, where)


def read_recipe(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The tree of a recipe with ``overrides`` in it, not yet checked, and for dotted keys the place they come from."""
    try:
        text = read_text(path)
    except OSError as error:
        problem = error.strerror or error
        if isinstance(error, FileNotFoundError):
            problem = f"{problem}; those that come with dapo: {', '.join(path.stem for path in shipped_recipes())}"
        raise ConfigError(f"{path}: cannot read the recipe: {problem}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8 (byte {error.start})") from None
    except ValueError as error:
        raise ConfigError(f"{str(path)!r}: cannot read the recipe: {error}") from None
    tree, lines = _parse_yaml(text, str(path))
    where = {key: f"{path}:{line}" for key, line in lines.items()}
    apply_overrides(tree, overrides, where)
    return tree, where


def with_values(config: Tree, values: Mapping[str, Any]) -> Tree:
    """``config`` with other values under keys such as ``data.train``, which are not checked again."""
    for key, value in values.items():
        section, _, name = key.partition(".")
        config = config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})
    return config


def items_beside(items: list[DataItem], folder: Path) -> list[DataItem]:
    return [item.model_copy(update={"path": file_beside(item.path, folder)}) for item in items]


def beside(config: Config, folder: Path) -> Config:
    """Files that lie beside the recipe, in ``folder``."""

    def own(name: str) -> str:
        return _named_beside(name, folder) if ":" in name else name

    advantage = config.algorithm.advantage
    values = {
        "algorithm.objective": own(config.algorithm.objective),
        "algorithm.advantage": advantage.model_copy(update={"kind": own(advantage.kind)}),
        "data.source": config.data.source and own(config.data.source),
        "data.train": items_beside(config.data.train, folder),
        "data.chat_template": config.data.chat_template and file_beside(config.data.chat_template, folder),
        "evaluation.data": items_beside(config.evaluation.data, folder),
        "evaluation.metrics": {metric: own(name) for metric, name in config.evaluation.metrics.items()},
        "monitor.check": config.monitor.check and _reward_beside(config.monitor.check, folder),
        "rollout.engine": own(config.rollout.engine),
        "run.trackers": list(map(own, config.run.trackers)),
    }
    return with_values(config, values).model_copy(update={"reward": _reward_beside(config.reward, folder)})


def _reward_beside(reward: Any, folder: Path) -> Any:
    def beside(one: Any) -> dict[str, str]:
        named = {key: getattr(one, key) for key in one.FILES}
        return {key: _named_beside(value, folder) for key, value in named.items() if value is not None}

    return changed_each(reward, beside)


def _named_beside(value: str, folder: Path) -> str:
    """A file, or something that is called by its name in a file: ``file.py:name``."""
    if ".py:" not in value:
        return value if _MODULE.fullmatch(value) else file_beside(value, folder)
    file, _, name = value.rpartition(":")
    return f"{file_beside(file, folder)}:{name}"


def file_beside(name: str, folder: Path) -> str:
    candidate = folder / name
    # os.path.exists and not Path.exists: the latter raises for a name that is too long
    return str(candidate) if not Path(name).is_absolute() and os.path.exists(candidate) else name  # noqa: PTH110


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # in C, eight times as fast
    """YAML as a recipe means it: dates and endless numbers stay text; a value that cannot be read has a line."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except Exception as error:  # the constructors let through whatever an impossible value raises
            raise yaml.constructor.ConstructorError(None, None, _reason(error), node.start_mark) from None

    def whole_number(self, node: yaml.ScalarNode) -> int | str:
        try:
            value = int(self.construct_yaml_int(node))
            str(value)
        except ValueError:
            return str(node.value)
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.whole_number)
_Loader.yaml_constructors = {  # neither bytes, dates nor sets, which a recipe has no use for and JSON no word
    tag: make
    for tag, make in _Loader.yaml_constructors.items()
    if tag is None or tag.rpartition(":")[2] in ("null", "bool", "int", "float", "str", "seq", "map")
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load_yaml(text: str) -> Any:
    """What is in ``text``, which may be somebody else's, in JSON's own types. No two keys share a mapping or a list
    (YAML's aliases do), so that an override changes one of them.
    Raises YAMLError: it is not YAML, is too large with its aliases written out, or has values of other types."""
    _check_size(text)
    return _unshared(yaml.load(text, Loader=_Loader))


def _check_size(text: str) -> None:
    """Count what the aliases stand for, before anything is made of it: each may hold many of the one before it."""
    anchors: dict[Any, int | None] = {}
    opened: list[tuple[str | None, int]] = []
    size = 0
    for event in yaml.parse(text[: _LARGEST + 1], Loader=_Loader):
        before, problem = size, ""
        if isinstance(event, yaml.AliasEvent):
            known = anchors.get(event.anchor, 0)  # of an anchor that is not known yet, the reader tells
            size += known or 0
            problem = f"nested too deeply: *{event.anchor} stands inside of itself" if known is None else ""
        elif isinstance(event, yaml.ScalarEvent):
            size += _VALUE + len(event.value)
            anchors[event.anchor] = size - before
        elif isinstance(event, yaml.CollectionStartEvent):
            size += _VALUE
            opened.append((event.anchor, before))
            anchors[event.anchor] = None
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            anchors[anchor] = size - before
        if size > _LARGEST or len(text) > _LARGEST:
            problem = f"too large: more than {_LARGEST} characters, or {_LARGEST // _VALUE} values, aliases written out"
        if len(opened) > _DEEPEST:
            problem = "nested too deeply"
        if problem:
            mark: Any = event.start_mark
            raise yaml.composer.ComposerError(None, None, problem, mark)


def _parse_yaml(text: str, source: str) -> tuple[dict[str, Any], dict[str, int]]:
    try:
        tree = load_yaml(text)
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{source}{line}: not valid YAML: {problem}") from None
    except Exception as error:  # the YAML reader lets through whatever an impossible date or number raises
        raise ConfigError(f"{source}: not valid YAML: {_reason(error)}") from None
    if node is None:
        raise ConfigError(f"{source}: the recipe is empty; it needs at least model.path")
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: a recipe is a mapping of sections, found {type(tree).__name__}")
    lines: dict[str, int] = {}
    _collect_lines(node, "", lines, source)
    return tree, lines


def _reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error) or type(error).__name__


def _unshared(node: Any, depth: int = 0) -> Any:
    if depth > _DEEPEST:  # aliases may add up
        raise yaml.constructor.ConstructorError(None, None, "nested too deeply", None)
    if isinstance(node, dict):
        return {key: _unshared(value, depth + 1) for key, value in node.items()}
    return [_unshared(value, depth + 1) for value in node] if isinstance(node, list) else node


def _collect_lines(node: yaml.Node, prefix: str, lines: dict[str, int], source: str) -> None:
    if isinstance(node, yaml.SequenceNode):
        for place, item in enumerate(node.value):
            _collect_lines(item, f"{prefix}{place}.", lines, source)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        kind = key_node.tag.rpartition(":")[2]
        if kind not in ("str", "merge") and (kind == "null" or not prefix):
            shown = f"{prefix}{key}" if key else f"{prefix}(nothing before the colon)"
            raise ConfigError(f"{source}:{line}: {shown}: YAML reads this key as {kind}; a key is a name")
        if key in seen and key != "<<":
            raise ConfigError(f"{source}:{line}: {prefix}{key}: given twice (first in line {seen[key]})")
        seen[key] = line
        lines[prefix + key] = line
        _collect_lines(value_node, f"{prefix}{key}.", lines, source)


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A tree from dotted keys: ``{"a.b": 1}`` becomes ``{"a": {"b": 1}}``."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        _assign(tree, key, value, f"{key}={value}")
    return tree


def flat(tree: Mapping[str, Any], prefix: str = "", leaves: Container[str] = ()) -> Iterator[tuple[str, Any]]:
    """The leaves of a tree under dotted keys: the other way round; an empty mapping is a leaf, and so is what a key of
    ``leaves`` holds."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value and f"{prefix}{key}" not in leaves:
            yield from flat(value, f"{prefix}{key}.", leaves)
        else:
            yield f"{prefix}{key}", value


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str], where: dict[str, str]) -> None:
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", key):
            raise ConfigError(f"override {override!r}: expected section.key=value, such as training.steps=20")
        try:
            value = load_yaml(text)
        except Exception:  # not only YAMLError: see _parse_yaml
            raise ConfigError(f"override {override!r}: the value is not valid YAML; quote it") from None
        _assign(tree, key, value, override)
        where[key] = f"override {override}"


def _assign(tree: dict[str, Any], key: str, value: Any, override: str) -> None:
    *parents, last = path = key.split(".")
    if isinstance(value, bool) and "enable" in fields_at(path):  # the other keys of the section stay as they are
        parents, last = path, "enable"
    for place, parent in enumerate(parents):
        if tree.get(parent) is None:
            tree[parent] = {}
        elif isinstance(tree[parent], bool) and "enable" in fields_at(parents[: place + 1]):
            tree[parent] = {"enable": tree[parent]}
        tree = tree[parent]
        if not isinstance(tree, dict):
            raise ConfigError(f"override {override!r}: {parent} is not a section")
    tree[last] = value


_NO_RUN = {"algorithm": {"filter_groups": {"metric": "score"}}}
"""Around a reward alone: nothing is sampled, so it need not say what is right."""
_MODULE = re.compile(r"[\w.]+:\w+")
"""A function in a module: not a file."""
_DEEPEST = 50
_LARGEST, _VALUE = 2**18, 16
"""Characters of YAML, with its aliases written out; and as how many of them each value counts on top of its own."""
