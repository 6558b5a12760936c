"""What the tests of ranking share: a reward model and a DPO run over tiny models, and rows of sums."""

from __future__ import annotations

from pathlib import Path

from run_cases import TOKENIZER, tiny_model
from stage_cases import run


def save_tiny(folder: Path) -> Path:
    tiny_model().save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def trained(stage: str, folder: Path, **changes: object) -> Path:
    """A run of a stage whose model is on the disk."""
    base = save_tiny(folder.parent / "base")
    run(stage, folder, {"model.path": str(base), "training.steps": 8, **changes}, model=str(base), tokenizer=None)
    return folder
