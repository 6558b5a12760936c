"""The weights of a run in Hugging Face layout, for other programs too."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dapo.model.tokenizer import save_tokenizer
from dapo.observe.run_folder import RunFolder
from dapo.orchestrator.protocols import Trained
from dapo.training.snapshot import LearnerSnapshot
from dapo.util.asynchronous import in_thread
from dapo.util.files import new_folder, writing

_ROUNDED = 0.05
"""Share of the changed weights that an export may lose before it is told."""


@dataclass(frozen=True)
class ModelWriter:
    """Writes ``model-before/`` and ``model-after/``, and the models of checkpoints.

    ``stop_ids``: tokens that end a response; they go with the weights too. ``export_dtype``: of the weights in
    ``model-after/``, and in ``model-before/`` if it holds them; None: float32. ``compute_dtype``: of the model that was
    sampled from. All raise UserError: they cannot be written.
    """

    folder: RunFolder
    learner: Trained
    tokenizer: Any
    tell: Callable[[str], object]
    stop_ids: Sequence[int] = ()
    export_dtype: torch.dtype | None = None
    compute_dtype: torch.dtype = torch.float32

    def write(self, snapshot: LearnerSnapshot, folder: Path) -> None:
        """``model`` with the tokenizer, and ``optimizer``, of a checkpoint."""
        snapshot.write(folder, self.stop_ids)
        save_tokenizer(self.tokenizer, folder / "model")

    async def _export(self, folder: Path, **how: Any) -> None:
        with writing(folder), new_folder(folder) as staging:
            await self.learner.export(staging, dtype=self.export_dtype, stop_ids=self.stop_ids, **how)
            await in_thread(save_tokenizer, self.tokenizer, staging)

    async def write_before(self) -> None:
        """Those at the start of the run, which its reference policy and a replay are read from: nothing is lost."""
        folder = self.folder.model_before
        if not folder.exists():  # as it does where a run was killed in its first step
            await self._export(folder, exact=True)

    async def write_after(self) -> None:
        """Those at the end of the run."""
        folder, dtype = self.folder.model_after, self.export_dtype
        await in_thread(partial(shutil.rmtree, folder, ignore_errors=True))  # of a run that was done, and was resumed
        await self._export(folder)
        if dtype is None or dtype.itemsize >= self.compute_dtype.itemsize:  # as it was sampled and evaluated
            return
        lost = await self.learner.share_rounded_back(self.folder.model_before, dtype)
        if lost > _ROUNDED:
            self.tell(
                f"{folder}: {str(dtype)[6:]} rounds {lost:.0%} of the trained weights back to where "
                "they were, so it is not quite the model that was evaluated. With model.export_dtype=float32 it is; "
                "the checkpoints' models are in float32 too"
            )
