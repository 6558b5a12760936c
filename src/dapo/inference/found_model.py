"""The model that a name stands for: a folder, a run, a checkpoint, or a name on the hub."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dapo.errors import ModelError
from dapo.observe.checkpoints import Checkpoints
from dapo.util.files import holds_model


@dataclass(frozen=True, slots=True)
class FoundModel:
    """``path``: folder in Hugging Face layout, or a name on the hub. ``recipe``: of the run that it comes from."""

    path: str
    recipe: Path | None = None


def find_model(name: str) -> FoundModel:
    """The model that ``name`` stands for: a folder in Hugging Face layout, a run folder (its last weights, which are
    model-after/ or else those of the last checkpoint), a checkpoint folder, or a name on the hub.
    Raises ModelError: there is such a folder, but no model in it; or a path that leads nowhere."""
    folder = Path(name).expanduser()
    if os.path.isfile(folder):  # noqa: PTH113  (the methods of Path raise for a name that is too long)
        raise ModelError(f"model {name}: is a file; name the folder that holds config.json and the weights")
    if not name or not os.path.isdir(folder):  # noqa: PTH112
        if name.startswith((".", "/", "~")) or name.count("/") > 1 or not name:
            raise ModelError(f"model {name!r}: no such folder")
        return FoundModel(name)  # whether the hub has it shows when it is loaded
    runs = folder / "checkpoints"
    furthest_first = reversed(Checkpoints(runs).places() if runs.is_dir() else [])
    kept = (runs / place.name / "model" for place in furthest_first)
    places = [folder, folder / "model", folder / "model-after", *kept]
    found = next((place for place in places if holds_model(place)), None)
    if found is None:
        raise ModelError(
            f"model {name}: the folder holds no model: neither config.json (Hugging Face layout), nor "
            "adapter_config.json (a LoRA adapter), nor model/ (a checkpoint), nor model-after/ or checkpoints/ (a run "
            "folder)"
        )
    return FoundModel(str(found), _recipe_of(found))


def _recipe_of(model: Path) -> Path | None:
    """The resolved recipe of the run whose folder a model lies in: RUN/model-after or RUN/checkpoints/NAME/model."""
    for run in list(model.resolve().parents)[:3:2]:
        if (run / "config.yaml").is_file() and (run / "environment.json").is_file():
            return run / "config.yaml"
    return None
