"""What is in the wheel: the package, its type marker, a rubric and the recipes, found there by an installed program."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (path,) = folder.glob("dapo-*.whl")
    return path


def test_the_wheel_holds_the_package_its_types_its_rubric_and_every_recipe(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    recipes = [path.name for path in (ROOT / "recipes").glob("*.yaml")]
    assert "cpu-demo.yaml" in recipes
    assert {f"dapo/shipped_recipes/{name}" for name in recipes} | {"dapo/py.typed"} <= names
    assert "dapo/reward/judge/rubric.jinja" in names
    static = ROOT / "src" / "dapo" / "ui" / "static"
    page = {f"dapo/ui/static/{path.relative_to(static)}" for path in static.rglob("*") if path.is_file()}
    assert "dapo/ui/static/index.html" in page and page <= names
    sources = {f"dapo/{path.relative_to(ROOT / 'src' / 'dapo')}" for path in (ROOT / "src" / "dapo").rglob("*.py")}
    assert sources == {name for name in names if name.endswith(".py")}
    assert not [name for name in names if name.startswith(("tests", "src"))]


def test_an_installed_program_finds_its_recipes(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "from dapo.config import load_config\nfrom dapo.recipes import recipe_path\n"
    code += "path = recipe_path('cpu-demo'); load_config(path); print(path)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(tmp_path / "dapo" / "shipped_recipes" / "cpu-demo.yaml")
