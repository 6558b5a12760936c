"""What ``dapo doctor`` looks at in the recipe of a stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from dapo.checks import memory, model, settings
from dapo.checks.checklist import Entry
from dapo.checks.context import CheckContext, Finding, NotAtHand, on_this_machine
from dapo.config.reading import with_values
from dapo.orchestrator.inputs import RunOverrides
from dapo.stages.run import StageSetup


def entries() -> Sequence[Entry]:
    """As :func:`dapo.checks.checklist.entries`."""
    return [
        Entry("files", "data", settings.check_files),
        Entry("run-folder", "machine", settings.check_run_folder),
        Entry("device", "machine", model.check_device),
        Entry("architecture", "model", model.check_architecture, 60.0),
        Entry("rows", "data", _check_rows, 120.0),
        Entry("disk", "machine", _check_disk),
        Entry("memory", "machine", memory.check_memory),
        Entry("snapshot", "machine", settings.check_snapshot),
        Entry("weights", "model", model.check_weights, 300.0),
    ]


def _check_rows(context: CheckContext) -> Iterator[Finding]:
    """Rows, tokenizer, template and keys as the stage itself reads them."""
    context.need(context.files, "files")
    context.need(context.shape, "model")
    config: Any = context.config
    if (name := config.model.tokenizer) and not on_this_machine(name, "tokenizer_config.json"):
        raise NotAtHand("tokenizer")
    heard = model.Heard()
    free = with_values(config, {"run.if_exists": "rename"})  # that the folder is free is another check
    setup = StageSetup.of(cast("Any", free), heard, RunOverrides())
    context.config, context.source = setup.config, setup.source
    for text in heard.warnings:
        yield Finding("data", "rows", "warn", text)
    longest = max(one.longest for row in setup.source.prompts for one in row.meta["examples"])
    text = f"{setup.source.rows:,} rows, the longest looked at of {longest:,} tokens, {len(setup.heldout):,} held out"
    yield Finding("data", "rows", "pass", f"{text}; updates: {setup.config.training.steps:,}")


def _check_disk(context: CheckContext) -> Iterator[Finding]:
    context.need(context.source, "tokenized data")
    yield from settings.check_disk(replace(context, config=with_values(context.config, {"run.save_samples": False})))
