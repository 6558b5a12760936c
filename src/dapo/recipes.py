"""Where the recipes that come with the package lie: in the repository beside ``src``, in a wheel inside the package."""

from __future__ import annotations

from pathlib import Path

from dapo.errors import ConfigError

_INSTALLED = Path(__file__).with_name("shipped_recipes")
_CHECKOUT = Path(__file__).parents[2] / "recipes"


def recipe_path(name: str) -> Path:
    """The file of a shipped recipe, such as ``cpu-demo``.

    Raises:
        ConfigError: there is none of this name.
    """
    for folder in (_INSTALLED, _CHECKOUT):
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    known = sorted({path.stem for folder in (_INSTALLED, _CHECKOUT) for path in folder.glob("*.yaml")})
    raise ConfigError(f"no recipe {name!r} comes with dapo; there are: {', '.join(known)}")
