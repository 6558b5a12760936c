"""Going on with a run: which recipe it has, and what may be another one than before."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from dapo.config import Config, build_config, load_config, load_yaml
from dapo.errors import ConfigError
from dapo.files import read_json, read_text
from dapo.fingerprint import differences
from dapo.redaction import redact, require_secrets
from dapo.run_folder import RunFolder

MAY_CHANGE = (
    *("training.steps", "training.minutes", "training.max_skipped_updates", "training.mismatch_alarm"),
    "training.offload_optimizer",
    *("evaluation.every", "evaluation.patience", "evaluation.min_improvement"),
    *("reward.workers", "reward.max_error_rate", "reward.responses_per_call", "reward.concurrency", "reward.retries"),
    *("reward.give_up_after_s", "reward.hedge_after_s", "reward.url", "reward.token_env", "reward.api_key_env"),
    "reward.cache",
    "monitor",
    "run",
)
"""Keys, and sections with all of their keys, that do not change what is learned. Those of ``reward`` hold for the
rewards that one is put together from, too."""

MAY_CHANGE_UNLESS_DETERMINISTIC = (
    *(
        "runtime.threads",
        "runtime.device",
        "rollout.max_concurrent_samples",
        "rollout.cache_gib",
        "training.tokens_per_micro_batch",
        "training.activation_checkpointing",
    ),
    *("reward.timeout_s", "reward.memory_mb", "reward.test_timeout_s"),
)
"""Keys that change the order of additions, and so the last bits, or which scores fail."""

BY_CONTENT = (
    "model.path",
    "model.tokenizer",
    "data.train",
    "evaluation.data",
    "reward.function",
    "reward.rubric",
    "data.chat_template",
    "data.today",
)
"""Names of files and folders: they may lie elsewhere now, as long as what is in them is the same. And
a date, as long as the prompts are."""


def resume_config(run: Path, recipe: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The recipe of a run that goes on: its own, or ``recipe`` if that is the same but for keys that may change.

    Raises:
        ConfigError: ``run`` is no run, a key differs that may not, or ``run.dir`` is to be another folder.
    """
    folder = RunFolder(run)
    if not folder.config.is_file():
        raise ConfigError(f"--resume {run}: not a run folder: it holds no config.yaml")
    for override in overrides:
        key, _, value = override.partition("=")
        if key.strip() == "run.dir" and Path(value).resolve() != run.resolve():
            raise ConfigError(
                f"--resume {run}: {override}: a run goes on in its own folder; to keep both, copy it first"
            )
    config = load_config(recipe or folder.config, [*overrides, f"run.dir={run}"])
    remedy = "as section.key=value or by naming the recipe: dapo train RECIPE --resume RUN"
    require_secrets(config.model_dump(mode="json"), f"--resume {run}", remedy)
    check_resumable(folder, config)
    return config


def how_to_resume(run: Path, in_memory: Sequence[str]) -> str:
    """What goes on with a run. ``in_memory``: arguments of ``dapo.train`` that its folder does not hold."""
    if not in_memory:
        return f"dapo train --resume {run}"
    return f'dapo.train(..., resume="{run}") with the same {", ".join(in_memory)} and settings'


def require_nothing_in_memory(run: Path) -> None:
    """Raises ConfigError: the run was given something by ``dapo.train`` that its folder does not hold."""
    named: list[str] = []
    with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError):  # there may be no such run
        recorded = read_json(RunFolder(run).fingerprint)
        older = {"prompts": "prompts" in recorded["data.train"], "reward": recorded["reward"]["kind"] == "python"}
        named = list(recorded.get("in_memory", [name for name, there in older.items() if there]))
    if named:
        raise ConfigError(
            f"--resume {run}: was begun in Python, and its folder does not hold what was passed there as "
            f"{', '.join(named)}; go on in Python: {how_to_resume(run, named)}"
        )


def check_resumable(folder: RunFolder, config: Config) -> None:
    """Raises ConfigError: ``folder`` is no run's, or ``config`` would make it another run."""
    stored = _settings(folder)
    refused = list(_refused(redact(_with_new_keys(stored)), redact(config.model_dump(mode="json"))))
    if refused:
        lines = "\n".join(refused)
        raise ConfigError(
            f"{folder.root}: these settings differ from those of the run, and would make it another one:\n{lines}\n"
            f"To train on with other settings, start a new run from its weights (model.path)"
        )


def on_its_day(config: Config, folder: RunFolder) -> Config:
    """``config`` with the date that the prompts of a run tell, unless it names one itself."""
    told = (_settings(folder).get("data") or {}).get("today")
    return on_day(config, date.fromisoformat(str(told))) if told and config.data.today is None else config


def on_day(config: Config, today: date | None) -> Config:
    """``config`` with a date for the chat template; None: the template asks for none."""
    return config.model_copy(update={"data": config.data.model_copy(update={"today": today})})


def _settings(folder: RunFolder) -> Any:
    """Those that the run had when it last began. Its config.yaml may have been edited since, as a recipe is."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        settings = read_json(folder.fingerprint).get("settings")
        if isinstance(settings, dict):
            return settings
    try:  # of an earlier version, or killed before its fingerprint was written
        return load_yaml(read_text(folder.config))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{folder.config}: cannot be read: {error}") from None


def _with_new_keys(stored: Any) -> Any:
    """A recipe as an earlier version of the program wrote it, with the keys that have come since, at their defaults."""
    try:
        return build_config(stored).model_dump(mode="json")
    except ConfigError:  # it has keys that are gone: the comparison will name them
        return stored


def _refused(stored: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    deterministic = bool(new["runtime"]["deterministic"])
    for line in differences(stored, new):
        if not may_change(line.partition(":")[0], deterministic):
            yield line


def may_change(key: str, deterministic: bool) -> bool:
    """Whether a run may go on with another value of ``key``."""
    allowed = (*MAY_CHANGE, *BY_CONTENT, *(() if deterministic else MAY_CHANGE_UNLESS_DETERMINISTIC))
    key = re.sub(r"^reward\.parts\.\w+\.reward\.", "reward.", key)
    return any(key == name or key.startswith(f"{name}.") for name in allowed)
