"""The distribution: what is in the wheel, which extras the messages name, and what ``constraints.txt`` pins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from dapo.errors import install

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (path,) = folder.glob("dapo_rl-*.whl")
    return path


def test_the_wheel_holds_the_package_its_types_its_rubric_and_every_recipe(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    recipes = [path.name for path in (ROOT / "recipes").glob("*.yaml")]
    assert "cpu-demo.yaml" in recipes
    assert {f"dapo/shipped_recipes/{name}" for name in recipes} | {"dapo/py.typed"} <= names
    assert "dapo/reward/judge/rubric.jinja" in names
    static = ROOT / "src" / "dapo" / "commands" / "ui" / "static"
    page = {f"dapo/commands/ui/static/{path.relative_to(static)}" for path in static.rglob("*") if path.is_file()}
    assert "dapo/commands/ui/static/index.html" in page and page <= names
    sources = {f"dapo/{path.relative_to(ROOT / 'src' / 'dapo')}" for path in (ROOT / "src" / "dapo").rglob("*.py")}
    examples = {
        f"dapo/shipped_recipes/{path.relative_to(ROOT / 'recipes')}" for path in (ROOT / "recipes").rglob("*.py")
    }
    assert sources | examples == {name for name in names if name.endswith(".py")}
    assert not [name for name in names if name.startswith(("tests", "src"))]


def test_an_installed_program_finds_its_recipes(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "from dapo.config import load_config\nfrom dapo.config.plan import recipe_path\n"
    code += "path = recipe_path('cpu-demo'); load_config(path); print(path)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(tmp_path / "dapo" / "shipped_recipes" / "cpu-demo.yaml")


def _names(requirements: list[str]) -> set[str]:
    """Packages without extras, versions and markers, spelled as in ``constraints.txt``."""
    return {re.split(r"[\[<>=!~; ]", text, maxsplit=1)[0].lower().replace("_", "-") for text in requirements}


def test_a_message_names_the_distribution_and_an_extra_that_it_has() -> None:
    assert PROJECT["name"] == "dapo-rl" and install("ui") == "pip install 'dapo-rl[ui]'"
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    documents = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    named = {name for text in sources for name in re.findall(r"install\(['\"](\w+)['\"]\)", text)}
    named |= {name for text in sources + documents for name in re.findall(r"dapo-rl\[(\w+)\]", text)}
    assert {"ui", "report", "data", "lora", "remote"} <= named <= set(PROJECT["optional-dependencies"])
    assert not [text for text in sources + documents if "install 'dapo[" in text]


def test_all_that_setup_installs_is_pinned_with_hashes_but_for_torch() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    entries = re.findall(
        r"^([a-z][\w.-]*)==\S+(?: ;[^\\]*)? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.M
    )
    pinned = {name for name, _ in entries}
    assert len(pinned) == len(re.findall(r"^[a-z]", text, re.M)) > 100
    assert re.search(r"^# torch==2\.\d+\.\d+$", text, re.M)
    extras = PROJECT["optional-dependencies"]
    (own,) = (text for text in extras["dev"] if text.startswith("dapo-rl["))
    wanted = [*PROJECT["dependencies"], *extras["dev"]]
    wanted += [package for extra in own[8:-1].split(",") for package in extras[extra]]
    assert _names(wanted) - {"dapo-rl", "torch"} <= pinned
