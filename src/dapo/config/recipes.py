"""Where the recipes that come with the package lie: in the repository beside ``src``, in a wheel inside the package."""

from __future__ import annotations

import os
from pathlib import Path

from dapo.errors import ConfigError

_INSTALLED = Path(__file__).parents[1] / "shipped_recipes"
_CHECKOUT = Path(__file__).parents[3] / "recipes"


def shipped_recipes() -> list[Path]:
    return sorted((_INSTALLED if _INSTALLED.is_dir() else _CHECKOUT).glob("*.yaml"))


def _by_name() -> dict[str, Path]:
    return {path.stem: path for path in shipped_recipes()}


def existing_recipe(recipe: str | Path) -> Path:
    """``recipe``, or where there is no such file and it is only the name of a shipped one, that one's file."""
    return Path(recipe) if os.path.exists(recipe) else _by_name().get(str(recipe), Path(recipe))  # noqa: PTH110


def demo_of(recipe: Path) -> str | None:
    """The command that makes model and data of a shipped recipe; None for a recipe of the user's."""
    commands = {"cpu-demo": "dapo demo", "cpu-smollm2": "dapo demo word-problems"}
    return commands.get(recipe.stem) if recipe.resolve() in (path.resolve() for path in shipped_recipes()) else None


def recipe_path(name: str) -> Path:
    """The file of a shipped recipe, such as ``cpu-demo``. Raises ConfigError: there is none of this name."""
    known = _by_name()
    if name not in known:
        raise ConfigError(f"no recipe {name!r} comes with dapo; there are: {', '.join(known)}")
    return known[name]
