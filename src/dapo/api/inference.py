"""``dapo.evaluate`` and ``dapo.generate``: what these commands do, with models, rows and rewards from Python."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.api.rows import Data, files_or_rows
from dapo.config import Config, flat, nested
from dapo.config.plan import require_files
from dapo.errors import ConfigError, DataError
from dapo.inference.found_model import FoundModel
from dapo.inference.model import ONE_EACH, function_of, loaded_model, settings_for
from dapo.observe.progress import Listener, make_listener
from dapo.reward.registry import named

if TYPE_CHECKING:
    from dapo.data.rows import Messages
    from dapo.evaluation.statistics import Estimate
    from dapo.inference.generate import Response

_ROWS = "the rows given"


@dataclass(frozen=True, slots=True, repr=False)
class EvaluationResult:
    """``metrics``: ``avg@k``, ``pass@j`` and ``maj@j`` (where the reward tells right from wrong) and ``reward``, each
    with ``value`` and a 95% interval from ``low`` to ``high``. ``samples``: every response with its verdict.
    ``report``: as in the evaluation.json of ``dapo evaluate``."""

    metrics: Mapping[str, Estimate]
    samples: Sequence[Mapping[str, Any]]
    report: Mapping[str, Any]

    def __repr__(self) -> str:
        found = self.report["files"][0]
        k = found["samples_per_prompt"]
        names = [f"avg@{k}", f"pass@{k}", f"maj@{k}"] if k > 1 else ["avg@1"]
        told = [f"{n} {self.metrics[n].value:.3f}" for n in (*names, "reward") if n in self.metrics]
        return f"EvaluationResult({', '.join(told)}, {found['prompts']} prompts)"


def evaluate(
    model: Any,
    data: Data,
    reward: Callable[..., Any] | str | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    tokenizer: Any = None,
    samples: int | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    server: str | None = None,
    metrics: Mapping[str, Callable[..., float]] | None = None,
    listener: Listener | None = None,
) -> EvaluationResult:
    """Measure ``model`` on every row of ``data``, as ``dapo evaluate`` does.

    Args:
        model: folder in Hugging Face layout, name on the hub, run folder, or a loaded ``PreTrainedModel`` (then give
            its ``tokenizer``; the model is left as it is).
        data, reward: as for :func:`dapo.train`, but one file; reward None: that of ``settings`` or else of the run that
            the model comes from.
        settings: dotted keys of the config, such as ``{"reward.kind": "exact"}``, or nested. They count more than the
            recipe of the run that the model comes from.
        samples: k, of each row; by default 1.
        temperature: of sampling; by default 0, which is greedy.
        max_tokens: longest response, in tokens; by default 1024.
        server: address of an OpenAI-compatible server that samples; of ``model`` no weights are needed then.
        metrics: functions of the groups by name, beside those of ``evaluation.metrics``.
        listener: hears what happens; by default progress is printed.

    Raises UserError: a setting, row, model or reward is wrong; the message says which and what would work."""
    with closing(listener or make_listener()) as listener:
        files, rows = files_or_rows(data, "data", listener.phase)
        if len(files) > 1:
            raise DataError(f"data: {len(files)} files; evaluate one at a time, each has a result of its own")
        given: dict[str, Any] = {"data": files or [_ROWS], "samples": samples, "temperature": temperature}
        given |= {"max_tokens": max_tokens, "server": server}
        loaded, found, config = _settings(model, tokenizer, {"evaluation": {"rows": None}}, settings, **given)
        named_reward = reward is not None or any(key.startswith("reward") for key, _ in flat(settings or {}))
        if not named_reward and (why := function_of(found)):
            raise ConfigError(f"reward: {why}; give it, evaluate(..., reward=...), or another one, such as reward.kind")
        if files:
            require_files(config)

        from dapo.inference.evaluate import evaluate_files, report
        from dapo.orchestrator.inputs import RunOverrides

        scorer = named(reward) if isinstance(reward, str) else reward
        inputs = RunOverrides(loaded, tokenizer, heldout=rows, reward=scorer, metrics=metrics)
        write = partial(report, about={"server": server}, command=sys.argv)
        results, told = evaluate_files(config, listener, write, inputs=inputs)
    measured = results[0].evaluation
    return EvaluationResult(measured.estimates(), list(measured.sample_lines()), told)


def generate(
    model: Any,
    prompts: str | Mapping[str, Any] | Sequence[Any],
    settings: Mapping[str, Any] | None = None,
    *,
    tokenizer: Any = None,
    samples: int | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    listener: Listener | None = None,
) -> list[Response]:
    """What ``model`` answers, as ``dapo generate`` prints it.

    Args:
        prompts: a text, a chat (messages with ``role`` and ``content``), a row with a ``prompt``, or a list of these.
        listener: hears what happens; by default warnings are printed. All others are as for :func:`evaluate`.

    Returns all responses to the first prompt, then those to the next one. Each has ``text``, ``tokens`` (their number),
    ``finish_reason`` (``stop``, or ``length`` where it was cut) and ``logprob``.
    Raises UserError: a setting, prompt or model is wrong; the message says which and what would work."""
    given = {"samples": samples, "temperature": temperature, "max_tokens": max_tokens}
    loaded, _, config = _settings(model, tokenizer, ONE_EACH, settings, **given)
    texts = _texts(prompts, config)

    from dapo.inference.generate import generate_responses

    responses: list[Response] = []
    with closing(listener or make_listener(quiet=True)) as listener:
        generate_responses(config, texts, listener, responses.append, model=loaded, tokenizer=tokenizer)
    return responses


def _settings(
    model: Any, tokenizer: Any, layer: Mapping[str, Any], settings: Mapping[str, Any] | None, **given: Any
) -> tuple[Any, FoundModel, Config]:
    changes = dict(flat(settings or {}))
    loaded = loaded_model(model, tokenizer, changes)
    return loaded, *settings_for(model, given, layer, settings=nested(changes))


def _texts(prompts: Any, config: Config) -> list[str | Messages]:
    """Raises DataError: there are none, or one is neither a text nor a chat nor a row with one."""
    from dapo.data.rows import BadRow, Keys, check_row

    several: list[Any]
    if isinstance(prompts, str | Mapping):
        several = [prompts]
    elif hasattr(prompts, "iloc") or isinstance(prompts, Path) or not isinstance(prompts, Iterable):
        raise DataError(
            f"prompts: expected a text, a chat, a row or a list of these, got {type(prompts).__name__}; a data frame's "
            'rows: frame.to_dict("records")'
        )
    else:
        several = list(prompts)
    if several and isinstance(several[0], Mapping) and "role" in several[0]:  # one chat
        several = [several]
    if not several:
        raise DataError("prompts: there are none; give a text, a chat or a list of them")
    keys, texts = Keys(config.data.prompt_key, config.data.answer_key, None), []
    for place, one in enumerate(several):
        try:
            texts.append(check_row(one if isinstance(one, Mapping) else {keys.prompt: one}, keys, "").prompt)
        except BadRow as fault:
            raise DataError(f"prompts[{place}]: {fault}") from None
    return texts
