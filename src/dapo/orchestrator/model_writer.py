"""The weights of a run in Hugging Face layout, for other programs too."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dapo.model.export import rounded_back
from dapo.model.tokenizer import save_tokenizer
from dapo.observe.run_folder import RunFolder
from dapo.training.trainer import Trainer
from dapo.util.files import new_folder, writing

_ROUNDED = 0.05
"""Share of the changed weights that an export may lose before it is told."""


@dataclass(frozen=True)
class ModelWriter:
    """Writes ``model-before/`` and ``model-after/``, and the models of checkpoints.

    ``stop_ids``: tokens that end a response; they go with the weights too. ``export_dtype``: of the weights in
    ``model-after/``, and in ``model-before/`` if it holds them; None: float32. All raise UserError: they cannot be
    written.
    """

    folder: RunFolder
    trainer: Trainer
    tokenizer: Any
    tell: Callable[[str], object]
    stop_ids: Sequence[int] = ()
    export_dtype: torch.dtype | None = None

    def write(self, trainer: Trainer, folder: Path, **how: Any) -> None:
        """The weights of ``trainer``, which may be a snapshot, and the tokenizer."""
        with new_folder(folder) as staging:
            trainer.save(staging, stop_ids=self.stop_ids, **how)
            save_tokenizer(self.tokenizer, staging)

    def write_before(self) -> None:
        """Those at the start of the run, which its reference policy and a replay are read from: nothing is lost."""
        folder = self.folder.model_before
        if not folder.exists():  # as it does where a run was killed in its first step
            with writing(folder):
                self.write(self.trainer, folder, dtype=self.export_dtype, exact=True)

    def write_after(self) -> None:
        """Those at the end of the run."""
        folder, dtype, policy = self.folder.model_after, self.export_dtype, self.trainer.policy
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was done, and was resumed
        with writing(folder):
            self.write(self.trainer, folder, dtype=dtype)
        if dtype is None or dtype.itemsize >= policy.compute_dtype.itemsize:  # as it was sampled and evaluated
            return
        lost = rounded_back(policy.model, self.folder.model_before, dtype)
        if lost > _ROUNDED:
            self.tell(
                f"{folder}: {str(dtype)[6:]} rounds {lost:.0%} of the trained weights back to where "
                "they were, so it is not quite the model that was evaluated. With model.export_dtype=float32 it is; "
                "the checkpoints' models are in float32 too"
            )
