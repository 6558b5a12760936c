"""Which keys may change when a run goes on, and from when; and what a run of an earlier version named."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError


def _keys(section: str, names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names.split())


MAY_CHANGE = (
    *_keys("training", "steps minutes samples tokens max_skipped_updates mismatch_alarm offload_optimizer"),
    *_keys("algorithm.filter_groups", "max_num_gen_batches on_starved"),
    *_keys("evaluation", "rows every patience min_improvement samples_per_prompt max_response_length stop"),
    *_keys("evaluation", "temperature top_p top_k min_p metrics while_sampling"),
    *_keys("reward", "workers max_error_rate responses_per_call concurrency give_up_after_s"),
    *_keys("reward", "url token_env cache"),
    *_keys("rollout", "url token_env model request text timeout_s give_up_after_s"),
    *_keys("runtime", "sync address engine reward"),
    *_keys("environment", "timeout_s tool_timeout_s workers"),
    *("data.on_bad_row", "data.max_bad_rows", "data.live", "data.proposer", "model.export_dtype", "monitor", "run"),
)
"""Keys, and sections with all of their keys, that change nothing but limits, evaluation and what is done around
training; so they hold at once. Those of ``reward`` hold for the rewards that one is put together from, too."""

FROM_THE_NEXT_STEP = (
    *_keys("training", "learning_rate final_learning_rate warmup_steps weight_decay adam_epsilon max_grad_norm"),
    *_keys("training", "groups_per_update epochs_per_rollout"),
    *_keys("algorithm", "objective clip_ratio_low clip_ratio_high clip_ratio_c loss_agg_mode loss_constant proximal"),
    *_keys("algorithm", "overlong_filtering overlong_hard_punishment advantage.kind advantage.epsilon"),
    *_keys("algorithm.overlong_buffer", "enable len penalty_factor"),
    *_keys("algorithm.correction", "kind level cap low high"),
    *_keys("algorithm.kl", "estimator coef target horizon"),
    *_keys("algorithm.critic", "learning_rate warmup_steps clip gamma lam bootstrap whiten"),
    "environment.credit",
)
"""Keys of objective and optimizer. A step that is under way is finished with those that it began with."""

BETWEEN_STEPS = (
    *_keys("rollout", "prompts_per_step samples_per_prompt max_response_length"),
    *_keys("rollout", "max_staleness ahead in_flight engine_args"),
    *_keys("algorithm", "filter_groups.enable filter_groups.metric filter_groups.tolerance kl.mode"),
    *_keys("environment", "max_turns max_turn_tokens"),
)
"""Keys of what is sampled and kept. Inside of a step, of which there are samples already, they are refused."""

MAY_CHANGE_UNLESS_DETERMINISTIC = (
    *_keys("runtime", "threads device kind placement learner"),
    *_keys("rollout", "max_concurrent_samples cache_gib device tensor_parallel"),
    *_keys("training", "tokens_per_micro_batch activation_checkpointing"),
    *_keys("reward", "timeout_s memory_mb test_timeout_s device"),
)
"""Keys that change the order of additions, and so the last bits, or which scores fail."""

BY_CONTENT = (
    *_keys("model", "path tokenizer"),
    *_keys("data", "train chat_template today"),
    "evaluation.data",
    *_keys("reward", "function rubric"),
)
"""Names of files and folders: they may lie elsewhere now, as long as what is in them is the same. And
a date, as long as the prompts are."""


FIXED: Mapping[str, tuple[str, ...]] = {
    "every draw follows from it": ("seed",),
    "it would be another model": _keys("model", "compute_dtype trust_remote_code lora"),
    "prompts or their order would be others": (
        *_keys("data", "prompt_key answer_key template chat_template_kwargs instruction system max_prompt_length"),
        *_keys("data", "shuffle shuffle_answers source sampling sampling_floor sampling_half_life sampling_target"),
    ),
    "it would be another policy": _keys("rollout", "engine temperature top_p top_k stop_token_ids stop"),
    "values would be those of another critic": _keys("algorithm", "kind critic.model critic.share_backbone"),
    "the KL would be to another policy": ("algorithm.kl.reference",),
    "Adam's moments were made with it": _keys("training", "betas moments"),
    "it has to hold for the whole run": _keys("runtime", "deterministic exact"),
    "it would be another task": _keys("environment", "name agent reply_chars"),
    "rewards so far would mean something else": ("reward",),
}
"""Keys that never change, by the reason; of ``reward`` all that no other table has."""


def may_change(key: str, deterministic: bool, inside: bool = False) -> bool:
    allowed = (*MAY_CHANGE, *FROM_THE_NEXT_STEP, *BY_CONTENT, *(() if inside else BETWEEN_STEPS))
    return is_one_of(key, allowed if deterministic else (*allowed, *MAY_CHANGE_UNLESS_DETERMINISTIC))


def is_one_of(key: str, names: Sequence[str]) -> bool:
    """Whether a key, or a section that holds it, is among ``names``."""
    key = re.sub(r"^reward\.parts\.\w+\.reward\.", "reward.", key)
    return any(key == name or key.startswith(f"{name}.") for name in names)


def without_gone(tree: Mapping[str, Any], faults: ValidationError, file: Path, where: Mapping[str, str]) -> Any:
    """What ``file`` holds. That of a run names every key of its version: without those that are gone since and held
    nothing, unless an override names them (``where``: for dotted keys, the place they come from)."""
    if file.name != "config.yaml" or not (file.parent / "fingerprint.json").is_file():
        return tree
    tree = copy.deepcopy(tree)
    gone: Iterator[Any] = (item["loc"] for item in faults.errors() if item["type"] == "extra_forbidden")
    for loc in gone:
        section: Any = tree
        keys = [str(loc[-1])]
        for part in loc[:-1]:  # of a union its kind is named, too
            if isinstance(section, list) or part in section:
                section = section[part]
                keys.insert(-1, str(part))
        named = where.get(".".join(keys), "").startswith("override ")
        if not named and loc[-1] in section and section[loc[-1]] is None:
            del section[loc[-1]]
    return tree
