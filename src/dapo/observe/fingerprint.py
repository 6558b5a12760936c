"""What a run started from, in a few numbers, so that a resumed run can tell whether it is still the same."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dapo.config import ComposeReward, Config
from dapo.config.user_parts import own_parts
from dapo.errors import UserError
from dapo.model.fingerprint import short_hash
from dapo.observe.progress import Listener
from dapo.records import Prompt
from dapo.util.differences import Difference, differences
from dapo.util.files import plain, read_json


def fingerprint(
    config: Config,
    of_model: Mapping[str, Any],
    tokenizer: Any,
    train: Mapping[str, Any],
    prompt: Prompt,
    heldout: Sequence[Prompt],
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """All that a run starts from. ``of_model``: :func:`~dapo.model.fingerprint.fingerprint_model`.
    ``train``: fingerprint of the training rows. ``prompt``: the first one to train on.
    ``given``: what was passed from Python in place of the recipe's ``reward`` and ``_OWN``, and beside its
    trackers and metrics."""
    parts = own_parts(config)
    found = {name: _of_part(parts.get(key, ""), given.get(name)) for key, name in _OWN.items()}
    own = {name: one for name, one in found.items() if one["function"]}
    for key in ("run.trackers", "evaluation.metrics"):
        several = {k.removeprefix(f"{key}."): _of_part(v) for k, v in parts.items() if k.startswith(f"{key}.")}
        several |= {str(name): _of_part("", one) for name, one in given.get(key, {}).items()}
        own |= {key: several} if several else {}
    return {
        **of_model,
        "tokenizer": fingerprint_tokenizer(tokenizer),
        "prompt": short_hash(prompt.token_ids),
        "data.train": train,
        "evaluation.data": fingerprint_prompts(heldout),
        "reward": fingerprint_reward(config, given.get("reward")),
        **own,
    }


def fingerprint_tokenizer(tokenizer: Any) -> dict[str, Any]:
    vocabulary = tokenizer.get_vocab()
    backend = getattr(tokenizer, "backend_tokenizer", None)  # merges, normalizer and all
    known = sorted(vocabulary.items(), key=lambda item: item[1]) if backend is None else backend.to_str()
    parts = [known, tokenizer.special_tokens_map, getattr(tokenizer, "chat_template", None)]
    return {"tokens": len(vocabulary), "hash": short_hash(parts)}


def fingerprint_prompts(prompts: Sequence[Prompt]) -> dict[str, Any]:
    return {"rows": len(prompts), "hash": short_hash([[p.text, p.answer] for p in prompts])}


def fingerprint_reward(config: Config, function: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Kind, and for a user's file a hash over it; of every part, if it is put together.
    ``function``: a function passed from Python, which stands in for the recipe's reward."""
    if function is not None:
        return _of_function("", function)
    reward = config.reward
    if isinstance(reward, ComposeReward):
        return {"kind": reward.kind, "parts": {name: _of_one(one) for name, one in reward.rewards.items()}}
    return _of_one(reward)


def _of_one(reward: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": reward.kind}
    for key in reward.FILES:
        name = getattr(reward, key)
        if name is not None:
            found |= _of_function(name) if key == "function" else {"file": _hash_of_file(Path(name))}
    return found


_OWN = {
    "algorithm.objective": "objective",
    "algorithm.advantage.kind": "advantage",
    "data.source": "source",
    "rollout.engine": "engine",
}
"""Keys that may name a part of the user's, with its name here and as an argument of Python."""


def fingerprint_methods(config: Config) -> dict[str, Any]:
    """Of the objective and advantage that ``config`` names in files of the user's."""
    parts = own_parts(config)
    return {name: _of_part(parts[key]) for key, name in _OWN.items() if key.startswith("algorithm.") and key in parts}


def _of_function(name: str, given: Any = None) -> dict[str, Any]:
    """Of a function that a recipe names, or that was passed from Python in its place."""
    if given is not None:
        return {"kind": "python", "function": getattr(given, "__qualname__", type(given).__name__)}
    file, _, function = name.rpartition(":") if ".py:" in name else ("", "", name)
    return {"function": function, "file": _hash_of_file(Path(file))} if file else {"function": function}


def _of_part(name: str, given: Any = None) -> dict[str, Any]:
    """:func:`_of_function`, with a hash of a module's file (it is loaded by now) or of what Python was given, where
    there is a source."""
    found = _of_function(name, given)
    with contextlib.suppress(OSError, TypeError):  # made in an interpreter, or not written in Python
        if given is not None:
            found["source"] = short_hash(inspect.getsource(given if hasattr(given, "__qualname__") else type(given)))
        elif ".py:" not in name and (file := getattr(sys.modules.get(name.rpartition(":")[0]), "__file__", None)):
            found["file"] = _hash_of_file(Path(file))
    return found


def _hash_of_file(file: Path) -> str | None:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    except OSError:
        return None  # said with its reason when it is loaded


def check_fingerprint(
    file: Path, now: Mapping[str, Any], listener: Listener, deterministic: bool = False
) -> list[Difference]:
    """Compare with what a run started from. Another reward, objective, advantage or device and other rows to evaluate
    on are said aloud and returned; anything else is refused.
    Raises UserError: the run started from another model, tokenizer or other data, or a deterministic one elsewhere."""
    try:
        then = read_json(file)
        if not isinstance(then, dict):
            raise ValueError
    except (OSError, ValueError):
        if any((file.parent / "checkpoints").glob("step-*")):  # otherwise it was killed before it was written
            unknown = "whether data and model are still the same is not known, nor what was changed so far"
            listener.warning(f"{file}: cannot be read, so {unknown}")
        return []
    # resume.py has looked at the first ones, trackers only hear, and the rows to evaluate on may be others
    ignored = ("settings", "in_memory", "changes", "run.trackers", "prompts")
    then, now = ({name: one for name, one in found.items() if name not in ignored} for found in (then, now))
    changed = list(differences(then, json.loads(json.dumps(plain(now)))))
    allowed = ("reward", "objective", "advantage", "engine", "evaluation", *(() if deterministic else ("device",)))
    of_source = ("source.file",)  # its code may be mended; another source could not go on from its position
    refused = [
        str(found) for found in changed if found.key.partition(".")[0] not in allowed and found.key not in of_source
    ]
    if refused:
        lines = [f"{file.parent}: cannot go on with this run, because what it started from has changed:", *refused]
        raise UserError("\n".join(lines))
    for found in changed:
        listener.warning(f"the {found.key.partition('.')[0]} is not the one that the run started with: {found}")
    return changed
