"""A hundred accidents to the shipped recipes, nightly two thousand: what comes out is truly valid, or refused with
place and key."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dapo.config import Config, all_keys, load_config, warnings_for
from dapo.config.plan import plan_of
from dapo.config.reference import Key, keys_of
from dapo.errors import ConfigError
from dapo.observe.run_folder import config_yaml

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))

Mutant = tuple[str | bytes, list[str]]
"""Text of a recipe, and overrides."""

Mutation = Callable[[str, random.Random], Mutant]


@pytest.fixture(autouse=True)
def nothing_heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import of one of these fails, also where another test has loaded it."""
    for name in ("torch", "transformers", "numpy", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)


def scalar_lines(text: str) -> list[int]:
    """Numbers of the lines that are ``key: value``, from 0."""
    return [n for n, line in enumerate(text.splitlines()) if re.match(r"\s*\w+: +[^#{\[&|>]", line)]


def with_value(text: str, rng: random.Random, value: str) -> str:
    """One of the keys has another value."""
    lines = text.splitlines()
    place = rng.choice(scalar_lines(text))
    lines[place] = f"{lines[place].partition(':')[0]}: {value}"
    return "\n".join(lines) + "\n"


def numeric() -> list[Key]:
    kinds = ("integer", "number")
    return [k for k in keys_of(Config) if k.type.startswith(kinds) and not k.name.startswith("reward.")]


def key_with(text: str) -> list[Key]:
    return [k for k in keys_of(Config) if text in k.type and not k.name.startswith("reward.")]


# --- what is wrong ------------------------------------------------------------------------------------------------


def misspelt_key(text: str, rng: random.Random) -> Mutant:
    lines = text.splitlines()
    place = rng.choice([n for n, line in enumerate(lines) if re.match(r"\s*\w+:", line)])
    key = re.match(r"\s*(\w+):", lines[place])
    assert key is not None
    at = rng.randrange(key.start(1), key.end(1))
    other = rng.choice([letter for letter in "qxz" if letter != lines[place][at]])
    changed = lines[place][:at] + other + lines[place][at + rng.randint(0, 1) :]
    lines[place] = changed
    return "\n".join(lines) + "\n", []


def wrong_section(text: str, rng: random.Random) -> Mutant:
    key = rng.choice([k for k in all_keys() if k.count(".") == 1 and k.split(".")[0] != "reward"])
    section, name = key.split(".")
    others = {k.split(".")[0] for k in all_keys()} - {section, "seed"}
    others -= {k.split(".")[0] for k in all_keys() if k.count(".") == 1 and k.endswith(f".{name}")}
    return text, [f"{rng.choice(sorted(others))}.{name}={rng.choice(['1', 'a', '[]'])}"]


def wrong_type(text: str, rng: random.Random) -> Mutant:
    key = rng.choice(numeric())
    return text, [f"{key.name}={rng.choice(['true', 'many', '[1]', '{a: 1}', '2020-02-30', '!!binary aGk=', '~x'])}"]


def out_of_range(text: str, rng: random.Random) -> Mutant:
    key = rng.choice(key_with(">"))
    return text, [f"{key.name}={rng.choice(['-1', '-0.5', '-1e9', str(-(10**30))])}"]


def not_finite(text: str, rng: random.Random) -> Mutant:
    return text, [f"{rng.choice(numeric()).name}={rng.choice(['.nan', '.inf', '-.inf', '1e999', '.NaN'])}"]


def null_for_a_value(text: str, rng: random.Random) -> Mutant:
    key = rng.choice([k for k in numeric() if "null" not in k.type])
    return text, [f"{key.name}={rng.choice(['null', '~', ''])}"]


def nested_junk(text: str, rng: random.Random) -> Mutant:
    depth = rng.choice([1, 3, 10, 40, 1000])
    opening, closing = rng.choice([("[", "]"), ("{a: ", "}")])
    return with_value(text, rng, opening * depth + "1" + closing * depth), []


def key_given_twice(text: str, rng: random.Random) -> Mutant:
    lines = text.splitlines()
    place = rng.choice(scalar_lines(text))
    lines.insert(place, lines[place])
    return "\n".join(lines) + "\n", []


def foreign_tag(text: str, rng: random.Random) -> Mutant:
    tags = ["!!python/object/apply:os.system [x]", "!!python/name:os.system", "!mine 3", "!!float", "!!set"]
    return with_value(text, rng, rng.choice(tags)), []


def odd_override(text: str, rng: random.Random) -> Mutant:
    forms = [
        "training.steps",
        "=3",
        "training..steps=3",
        ".steps=3",
        "training.steps.=3",
        "training.steps.x=1",
        "seed.x=1",
    ]
    forms += ["-steps=3", "training.steps=[1", "training.steps=3: 4: 5", "train ing.steps=1", "a" * 5000 + "=1", "é=1"]
    forms += ["__class__=1", "training.__class__=1", "training=[]", "training=7", "model_config={}", "training.\n=1"]
    return text, [rng.choice(forms)]


def reward_arguments(text: str, rng: random.Random) -> Mutant:
    odd = [
        "!!binary gIGC",
        "!!set {a, b}",
        "{1: 2}",
        "[.nan]",
        "{a: [.inf]}",
        '"\\ud800"',
        "{null: 1}",
        "!!timestamp 2020-01-02",
    ]
    return text, [f"reward={{kind: function, function: 'f.py:g', args: {{deep: {rng.choice(odd)}}}}}"]


# --- what may be either -------------------------------------------------------------------------------------------


def other_letters(text: str, rng: random.Random) -> Mutant:
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice("abz_:#-{}[]'\"\t\0é,&*!|%@` \n\u2028\ufeff") + text[at + rng.randint(0, 1) :]
    return text, []


def other_bytes(text: str, rng: random.Random) -> Mutant:
    raw = bytearray(text.encode())
    for _ in range(rng.randint(1, 3)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return bytes(raw), []


def huge_number(text: str, rng: random.Random) -> Mutant:
    sizes = [str(10**20), str(2**63), "9" * 4299, "9" * 5000, "0x" + "f" * 5000, "0b" + "1" * 9000, "1" + ":59" * 3000]
    return text, [f"{rng.choice(numeric()).name}={rng.choice(sizes)}"]


def date_for_a_value(text: str, rng: random.Random) -> Mutant:
    return with_value(
        text, rng, rng.choice(["2024-01-31", "2024-13-45", "2001-12-14t21:59:43.10-05:00", "12:30:45"])
    ), []


def cut_off(text: str, rng: random.Random) -> Mutant:
    return text[: rng.randrange(len(text))], []


def odd_value_of_any_key(text: str, rng: random.Random) -> Mutant:
    values = [
        "",
        "null",
        "off",
        "yes",
        "0",
        "-0",
        "1e3",
        "0o17",
        "'x'",
        "[]",
        "{}",
        "*x",
        "&a b",
        "<<",
        "|",
        "a\tb",
        "\0",
    ]
    return text, [f"{rng.choice(all_keys())}={rng.choice(values)}" for _ in range(rng.randint(1, 3))]


def several_at_once(text: str, rng: random.Random) -> Mutant:
    """A person who has more than one of these accidents in an evening."""
    overrides: list[str] = []
    for mutation in rng.choices([misspelt_key, wrong_type, odd_override, other_letters, odd_value_of_any_key], k=3):
        if not isinstance(text, str) or not scalar_lines(text):
            break
        changed, more = mutation(text, rng)
        text, overrides = changed if isinstance(changed, str) else text, [*overrides, *more]
    return text, overrides


# --- what is still valid ------------------------------------------------------------------------------------------


def comments_and_blank_lines(text: str, rng: random.Random) -> Mutant:
    lines = text.splitlines()
    for _ in range(rng.randint(1, 6)):
        lines.insert(rng.randint(0, len(lines)), rng.choice(["", "# note: {[", "   # é", "  "]))
    return rng.choice(["\n", "\r\n"]).join(lines) + "\n", []


def other_order(text: str, rng: random.Random) -> Mutant:
    def shuffled(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        items = [(key, shuffled(value)) for key, value in node.items()]
        rng.shuffle(items)
        return dict(items)

    return yaml.safe_dump(shuffled(yaml.safe_load(text)), sort_keys=False), []


def other_style(text: str, rng: random.Random) -> Mutant:
    tree = yaml.safe_load(text)
    if rng.random() < 0.3:
        return json.dumps(tree), []
    return yaml.safe_dump(tree, default_flow_style=rng.choice([True, False, None]), explicit_start=True, width=20), []


def defaults_spelt_out(text: str, rng: random.Random) -> Mutant:
    given = yaml.safe_load(text)

    def is_given(name: str) -> bool:
        node = given
        for part in name.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return node is not None

    free = [k for k in keys_of(Config) if not k.required and k.name.partition(".")[0] not in ("reward", "run")]
    free = [k for k in free if not is_given(k.name)]
    return text, [f"{k.name}={json.dumps(k.default)}" for k in rng.sample(free, min(5, len(free)))]


def numbers_in_other_spellings(text: str, rng: random.Random) -> Mutant:
    spellings = {"training.steps": ["1_0", "10.0", "0xa", "!!int '10'", "'10'", "&n 10"]}
    spellings |= {"training.learning_rate": ["1e-6", "1.0E-6", "0.000001", ".000001", "'1e-6'", "!!float 1e-6"]}
    spellings |= {"data.shuffle": ["yes", "On", "TRUE", "off", "n" + "o"]}
    return text, [f"{key}={rng.choice(values)}" for key, values in spellings.items()]


def aliases(text: str, rng: random.Random) -> Mutant:
    tree = yaml.safe_load(text)
    shared = {"temperature": rng.choice([0.5, 1.0])}
    tree["evaluation"] = {**tree.get("evaluation", {}), **shared}
    rollout = yaml.safe_dump(tree.pop("rollout", {}), default_flow_style=True, width=10**6).strip()
    runtime = yaml.safe_dump({**tree.pop("runtime", {}), "threads": 2}, default_flow_style=True).strip()
    return f"rollout: &r {rollout}\n{yaml.safe_dump(tree)}runtime: &t {runtime}\n", []


def any_text_for_text(text: str, rng: random.Random) -> Mutant:
    letters = "aé π\n\t'\"#:{}[]\\%&*!|>\x07\u2028\U0001f600-0"
    made = "".join(rng.choice(letters) for _ in range(rng.randint(0, 40)))
    key = rng.choice(["data.instruction", "data.system", "data.prompt_key"])
    return text, [f"{key}={json.dumps(made, ensure_ascii=False)}"]


REFUSED = [
    *(misspelt_key, wrong_section, wrong_type, out_of_range, not_finite, null_for_a_value, nested_junk),
    *(key_given_twice, foreign_tag, odd_override, reward_arguments),
]
EITHER = [other_letters, other_bytes, huge_number, date_for_a_value, cut_off, odd_value_of_any_key, several_at_once]
ACCEPTED = [
    *(comments_and_blank_lines, other_order, other_style, defaults_spelt_out, numbers_in_other_spellings, aliases),
    any_text_for_text,
]
EVERYTHING = REFUSED + EITHER + ACCEPTED
COUNTS = [100, pytest.param(2000, marks=pytest.mark.nightly)]
"""Accidents in all, over all kinds of them."""


def originals(in_all: int) -> list[str]:
    """The recipes that one mutation's share of so many is done to."""
    each = -(-in_all // len(EVERYTHING))
    return [RECIPES[n % len(RECIPES)].read_text(encoding="utf-8") for n in range(each)]


def mutants(mutation: Mutation, in_all: int) -> list[Mutant]:
    """What comes of them, the same each time."""
    rng = random.Random(mutation.__name__)
    return [mutation(text, rng) for text in originals(in_all)]


def load(folder: Path, mutant: Mutant) -> Config:
    text, overrides = mutant
    path = folder / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config(path, overrides)


def assert_valid(config: Config, folder: Path) -> None:
    """It can be written down and read again, and everything that follows from it can be computed."""
    again = folder / "again.yaml"
    again.write_text(config_yaml(config), encoding="utf-8")
    assert load_config(again) == config
    warnings_for(config)
    plan_of(config)


WHOLE_FILE = re.compile(
    r"recipe\.yaml: (not a text file|the recipe is empty|a recipe is a mapping|not valid YAML|"
    r"\S+: required but not given)"
)
"""Messages that name no line: they are about the whole file, or about what is not in it."""

NO_KEY = re.compile(
    r"not valid YAML|the recipe is empty|a recipe is a mapping|not a text file|given twice|not a section|"
    r"expected section\.key=value|unknown key|: [^:]+: YAML reads this key as"
)
"""Messages about something that is no key of the tree; they quote it."""


def assert_says_where(error: ConfigError, text: str | bytes) -> None:
    for line in str(error).splitlines():
        if not re.search(r"recipe\.yaml:\d+: |^override ", line) and not WHOLE_FILE.search(line):
            # a default that does not go with what the recipe says: the key is not in the recipe
            key = re.search(r"recipe\.yaml: ([\w.]+): ", line)
            assert key and key.group(1) in all_keys(), line
            assert not re.search(rf"^\s*{key.group(1).rpartition('.')[2]}:", str(text), re.MULTILINE), line
        elif not NO_KEY.search(line):
            keys = [*all_keys(), "monitor.check.kind"]  # of a section that may be left out
            assert any(re.search(rf": {re.escape(key)}(\.\d+)?: ", line) for key in keys), line


def assert_names_what_was_done(error: ConfigError, mutant: Mutant, original: str) -> None:
    """The override, or a line that is not what it was, is among the places named."""
    text, overrides = mutant
    if overrides:
        key = repr(overrides[0].partition("=")[0][:40])[1:-1]
        assert any(line.startswith("override ") and key in line for line in str(error).splitlines()), error
        return
    before, after = original.splitlines(), str(text).splitlines()
    changed = {n for n, line in enumerate(after, start=1) if n > len(before) or line != before[n - 1]}
    named = {int(n) for n in re.findall(r"recipe\.yaml:(\d+): ", str(error))}
    assert named & changed, (error, sorted(changed))


@pytest.mark.parametrize("in_all", COUNTS)
@pytest.mark.parametrize("mutation", REFUSED, ids=lambda m: m.__name__)
def test_what_is_wrong_is_refused_with_place_and_key(mutation: Mutation, in_all: int, tmp_path: Path) -> None:
    for mutant, original in zip(mutants(mutation, in_all), originals(in_all), strict=True):
        try:
            load(tmp_path, mutant)
        except ConfigError as error:
            assert_says_where(error, mutant[0])
            assert_names_what_was_done(error, mutant, original)
        else:
            pytest.fail(f"accepted: {mutant}")


def test_there_are_as_many_accidents_as_are_told_of() -> None:
    for in_all in (100, 2000):
        assert len(originals(in_all)) * len(EVERYTHING) >= in_all


@pytest.mark.parametrize("in_all", COUNTS)
@pytest.mark.parametrize("mutation", EITHER, ids=lambda m: m.__name__)
def test_any_accident_is_valid_or_refused_with_place_and_key(mutation: Mutation, in_all: int, tmp_path: Path) -> None:
    for mutant in mutants(mutation, in_all):
        try:
            config = load(tmp_path, mutant)
        except ConfigError as error:
            assert_says_where(error, mutant[0])
        else:
            assert_valid(config, tmp_path)


@pytest.mark.parametrize("in_all", COUNTS)
@pytest.mark.parametrize("mutation", ACCEPTED, ids=lambda m: m.__name__)
def test_what_is_still_valid_is_accepted(mutation: Mutation, in_all: int, tmp_path: Path) -> None:
    for mutant in mutants(mutation, in_all):
        assert_valid(load(tmp_path, mutant), tmp_path)
