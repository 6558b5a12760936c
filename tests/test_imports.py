"""What may load what: light where a client or the command line needs it light, one direction inside."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import dapo

PACKAGE = Path(dapo.__file__).parent
HEAVY = ("torch", "transformers", "math_verify", "sympy")


def loaded_by(code: str) -> set[str]:
    """Top-level packages in sys.modules of a fresh interpreter after ``code``."""
    code += "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "dapo",
        "dapo.config",
        "dapo.commands",
        "dapo.config.plan",
        "dapo.observe.progress",
        "dapo.observe.run_folder",
        "dapo.records",
    ],
)
def test_light_modules_stay_light(module: str) -> None:
    assert not loaded_by(f"import {module}") & set(HEAVY)


def test_help_reads_no_config() -> None:
    assert not loaded_by("import dapo.commands") & {"numpy", "pydantic", "yaml"}


@pytest.mark.parametrize("module", ["dapo.environments.worker", "dapo.reward.math.score", "dapo.reward.code.score"])
def test_workers_of_which_there_may_be_hundreds_stay_small(module: str) -> None:
    assert not loaded_by(f"import dapo.reward.worker, {module}") & {"numpy", "asyncio"}


def test_import_dapo_is_next_to_nothing() -> None:
    assert not loaded_by("import dapo") & {*HEAVY, "numpy", "pydantic", "yaml", "rich", "typer"}


def imports_of(path: Path) -> Iterator[str]:
    """Every module that a file names in an import, those inside functions too, those for type checkers not."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            nodes.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        nodes.extend(ast.iter_child_nodes(node))


def files(folder: str) -> list[Path]:
    found = sorted((PACKAGE / folder).rglob("*.py"))
    assert found
    return found


def test_algorithm_knows_records_and_itself_only() -> None:
    allowed = ("dapo.records", "dapo.algorithm")
    bad = [(p.name, m) for p in files("algorithm") for m in imports_of(p) if m.startswith("dapo")]
    assert [(name, module) for name, module in bad if not module.startswith(allowed)] == []


def test_rewards_see_no_tensor_but_that_of_a_reward_model() -> None:
    named = [(p.name, m) for p in files("reward") if p.parent.name != "model" for m in imports_of(p)]
    assert [(name, m) for name, m in named if m.partition(".")[0] in ("torch", "transformers")] == []


@pytest.mark.parametrize("folder", ["rollout", "training", "algorithm", "model"])
def test_only_the_orchestrator_and_the_buffer_know_rewards(folder: str) -> None:
    named = [(p.name, m) for p in files(folder) for m in imports_of(p)]
    assert [
        (name, m) for name, m in named if m.startswith(("dapo.reward", "dapo.orchestrator.experiment", "dapo.commands"))
    ] == []


def test_records_need_numpy_only() -> None:
    tops = {
        module.partition(".")[0]
        for name in ("records.py", "util/verdict.py")
        for module in imports_of(PACKAGE / name)
        if module != "dapo.util.verdict.Reward"
    }
    assert tops <= {*sys.stdlib_module_names, "numpy"}


ORDER = (
    *(
        "errors",
        "util",
        "records",
        "config",
        "data",
        "algorithm",
        "model",
        "training",
        "rollout",
        "reward",
        "environments",
        "evaluation",
    ),
    *("observe", "checks", "orchestrator", "plan", "inference", "stages"),
    *("ranking", "serve", "comparison", "distil", "api", "commands"),
)
"""Folders and the loose modules from below to above (decision 39)."""


def named_anywhere(path: Path) -> Iterator[str]:
    """Every module of ours that a file names in an import, also for type checkers only."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_each_folder_imports_only_from_those_below_it() -> None:
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert there - {"__init__", "__main__"} == set(ORDER)
    upwards = [
        f"{path.relative_to(PACKAGE)}: {module}"
        for path in files(".")
        if (room := path.relative_to(PACKAGE).parts[0].removesuffix(".py")) in ORDER
        for module in named_anywhere(path)
        if module.startswith("dapo.") and (other := module.split(".")[1]) in ORDER
        if ORDER.index(other) > ORDER.index(room)
    ]
    assert upwards == []


def test_modules_import_each_other_in_no_circle() -> None:
    """Lazy imports and those for type checkers included."""
    names = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in files(".")}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    below = {
        name: {
            found for module in named_anywhere(path) for found in (module, module.rpartition(".")[0]) if found in names
        }
        for name, path in names.items()
    }
    for name, modules in below.items():  # `from package import module` names the module only
        below[name] = {m for m in modules if m != name and not any(other.startswith(f"{m}.") for other in modules)}
    TopologicalSorter(below).prepare()  # raises CycleError, which names the modules
