"""``dapo.sft``, ``dapo.dpo`` and ``dapo.reward_model``: a model and rows are a stage."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from dapo.api import Result, free_folder, result_of
from dapo.api.rows import Data, files_or_rows
from dapo.config import flat, nested
from dapo.config.stages import build_stage
from dapo.inference.model import loaded_model
from dapo.observe.progress import Listener, make_listener
from dapo.observe.run_folder import RunFolder

SIZES: Mapping[str, Any] = {
    "training.rows_per_update": 16,
    "training.warmup_steps": 2,
    "training.tokens_per_micro_batch": 8192,
    "run.if_exists": "rename",
}
"""Sizes for a laptop. Settings override them."""


def sft(model: Any, rows: Data, settings: Mapping[str, Any] | None = None, **options: Any) -> Result:
    """Fine-tune ``model`` on rows of ``prompt`` and ``response``, or of ``messages``; see :func:`stage`."""
    return stage("sft", model, rows, settings, **options)


def dpo(model: Any, rows: Data, settings: Mapping[str, Any] | None = None, **options: Any) -> Result:
    """Train ``model`` on rows of ``prompt``, ``chosen`` and ``rejected``, or of ``responses``; see :func:`stage`."""
    return stage("dpo", model, rows, settings, **options)


def reward_model(model: Any, rows: Data, settings: Mapping[str, Any] | None = None, **options: Any) -> Result:
    """Make ``model`` a reward model by rows as for :func:`dpo`, or by labelled texts; see :func:`stage`."""
    return stage("reward_model", model, rows, settings, **options)


def stage(
    kind: str,
    model: Any,
    rows: Data,
    settings: Mapping[str, Any] | None = None,
    *,
    tokenizer: Any = None,
    heldout: Data | None = None,
    listener: Listener | None = None,
    resume: str | Path | None = None,
) -> Result:
    """What the three functions share.

    Args:
        model, tokenizer, rows, heldout, listener: as for :func:`dapo.train`; rows as docs/methods.md says.
        settings: keys of the stage's recipe, dotted or nested; :data:`SIZES` has other defaults.
        resume: folder of a stage to go on with, given the same arguments.

    Raises UserError: a setting, a row or the model is wrong; the message says which and what would work."""
    from dapo.orchestrator.inputs import RunOverrides
    from dapo.stages.run import as_begun, run_stage

    tree = dict(flat(settings or {}))
    loaded = loaded_model(model, tokenizer, tree)
    tree["model.path"] = str(model) if loaded is None else type(model).__name__
    tree = {**SIZES, "run.dir": str(resume or free_folder()), **tree}
    key = "reward_model.template" if kind == "reward_model" else "data.template"
    if key not in tree:  # the tokenizer's chat template where it has one
        from dapo.model.loading import load_tokenizer

        read = tokenizer or load_tokenizer(str(tree.get("model.tokenizer") or tree["model.path"]))
        tree[key] = "chat" if getattr(read, "chat_template", None) else "plain"
    with closing(listener or make_listener()) as listener:
        files, given = files_or_rows(rows, "rows", listener.phase)
        held_files, held = ([], None) if heldout is None else files_or_rows(heldout, "heldout", listener.phase)
        tree |= {key: found for key, found in (("data.train", files), ("evaluation.data", held_files)) if found}
        config = build_stage(kind, nested(tree))
        folder = RunFolder(Path(resume)) if resume is not None else None
        config = as_begun(folder, config) if folder is not None else config
        inputs = RunOverrides(loaded, tokenizer, given, held, resume=folder)
        summary = run_stage(config, listener, inputs)
        listener.finished(summary)
        return result_of(summary)
