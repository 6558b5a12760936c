"""``dapo generate`` without its printing: prompts in, responses out in the order they were asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from typing import Any

from dapo.config import Config
from dapo.data.rows import Messages, Row
from dapo.data.source import read_prompts
from dapo.errors import ConfigError, DataError
from dapo.evaluation.evaluate import evaluation_sampling
from dapo.inference.model import Prompting, doubts, label_of, load_engine, load_prompting, settings_lines
from dapo.inference.stream import Likely, Part, likeliest, written
from dapo.observe.progress import Listener
from dapo.records import Prompt, Sample
from dapo.rollout.engine import InterruptibleEngine, Request
from dapo.rollout.seeds import sample_seed
from dapo.util.asynchronous import run_async


@dataclass(frozen=True, slots=True)
class Response:
    """One response. Numbers count from 1; ``logprob`` is the sum over the response's tokens, in nats.

    ``token_logprobs``: every token with its log-probability and the most likely ones in its place; None: not asked for.
    """

    prompt_number: int
    sample_number: int
    prompt: str
    text: str
    finish_reason: str
    prompt_tokens: int
    tokens: int
    logprob: float
    token_logprobs: list[dict[str, Any]] | None = None

    def as_json(self) -> dict[str, Any]:
        found = {"response" if name == "text" else name: value for name, value in asdict(self).items()}
        return {name: value for name, value in found.items() if value is not None}


def generate_responses(
    config: Config,
    texts: Sequence[str | Messages],
    listener: Listener,
    show: Callable[[Response], None],
    top_logprobs: int = 0,
    model: Any = None,
    tokenizer: Any = None,
) -> None:
    """Sample ``evaluation.samples_per_prompt`` responses to every text and every row of ``evaluation.data``, whose
    answers are not needed. ``show`` is called with each response as soon as all before it are there; ``top_logprobs``
    of the most likely tokens are reported at each place. ``model``, ``tokenizer``: loaded ones, used in place of the
    config's.
    Raises UserError: something in model or data is wrong."""
    if config.rollout.engine == "openai":
        raise ConfigError("rollout.engine: dapo generate samples in this process; use dapo evaluate --server URL")
    listener.phase("loading the tokenizer")
    prompting = load_prompting(config, model, tokenizer)
    prompts = prompts_for(prompting, texts)
    for said in doubts(prompting, prompts):
        listener.warning(said)
    for line in settings_lines(prompting.config):
        if not line.startswith("reward"):
            listener.phase(line)
    listener.phase("loading the model")
    samples = sum(map(len, prompts.values())) * config.evaluation.samples_per_prompt
    engine = load_engine(prompting, prompts, samples, listener)
    everything = [prompt for several in prompts.values() for prompt in several]
    run_async(lambda: _generate(prompting, engine, everything, show, top_logprobs))


def prompts_for(prompting: Prompting, texts: Sequence[str | Messages]) -> dict[str, tuple[Prompt, ...]]:
    """By where they come from. Raises DataError if a row is bad, or the tokenizer knows nothing of a prompt."""
    found: dict[str, tuple[Prompt, ...]] = {}
    if texts:
        encode = prompting.template.encode
        found["PROMPT"] = tuple(Prompt(k, Row(t, None).text, tuple(encode(t))) for k, t in enumerate(texts))
    for prompt in found.get("PROMPT", ()):
        if not prompt.token_ids:
            raise DataError(f"PROMPT: the tokenizer makes no tokens of {prompt.text[:60]!r}")
    config = prompting.config
    for item in config.evaluation.data:
        found[label_of(item)] = read_prompts(
            config.data, [item], prompting.template, answer_required=False, limit=config.evaluation.rows
        )
    return found


async def _generate(
    prompting: Prompting,
    engine: InterruptibleEngine,
    prompts: Sequence[Prompt],
    show: Callable[[Response], None],
    top_logprobs: int,
) -> None:
    config = prompting.config
    each = config.evaluation.samples_per_prompt
    sampling = replace(evaluation_sampling(config), top_logprobs=top_logprobs)
    requests = [
        Request(place, p.token_ids, tuple(sample_seed(config.seed, place, 0, i) for i in range(each)), sampling)
        for place, p in enumerate(prompts)
    ]
    waiting: dict[tuple[int, int], Part] = {}
    order = iter([(place, index) for place in range(len(prompts)) for index in range(each)])
    awaited = next(order, None)
    try:
        async with aclosing(written(engine, prompting.template, requests, drafts=False)) as parts:
            async for part in parts:
                waiting[part.request_id, part.index] = part
                while awaited in waiting:
                    show(_response(prompting, prompts[awaited[0]], awaited, waiting.pop(awaited)))
                    awaited = next(order, None)
    finally:
        await engine.close()


def _response(prompting: Prompting, prompt: Prompt, place: tuple[int, int], part: Part) -> Response:
    sample = part.sample
    assert sample is not None  # no drafts were asked for
    return Response(
        prompt_number=place[0] + 1,
        sample_number=place[1] + 1,
        prompt=prompt.text,
        prompt_tokens=len(prompt.token_ids),
        text=part.text,
        finish_reason=sample.finish_reason,
        tokens=sample.length,
        logprob=float(sample.logprobs.sum(dtype="float64")),
        token_logprobs=None if sample.top_ids is None else _token_logprobs(prompting, sample),
    )


def _token_logprobs(prompting: Prompting, sample: Sample) -> list[dict[str, Any]]:
    def told(token: Likely) -> dict[str, Any]:
        return dict(zip(("id", "token", "logprob"), token, strict=True))

    return [told(token) | {"top": list(map(told, best))} for token, best in likeliest(prompting.template, sample)]
