"""What the native engine refuses to sample, on every device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator

from dapo.rollout.engine import EngineError, NotFiniteError, Request, Sampling
from dapo.rollout.native.stopping import NO_TEXT

MOST_TOP_LOGPROBS = 20
"""They are for people to look at. A kernel keeps so many candidates at hand for every row, and a response carries them
for every token, so that a large number would cost more than the sampling itself."""

LEAST_TEMPERATURE = 1e-4  # logits divided by less would overflow, and the distribution is greedy long before that


def check_request(
    request: Request, *, vocabulary: int, max_sequence: int, can_decode: bool, stop_ids: Collection[int]
) -> None:
    """Refuse a request that cannot be served, or whose settings mean nothing.

    Args:
        vocabulary: rows of the output head.
        max_sequence: longest prompt and response together, in tokens.
        can_decode: whether token ids can be made into text, which stop texts need.
        stop_ids: each ends a response.

    Raises EngineError: says which request and why.
    """
    problems = _problems(request, vocabulary, max_sequence, can_decode)
    for problem in itertools.chain(problems, _draft_problems(request, vocabulary, stop_ids)):
        raise EngineError(f"request {request.id}: {problem}")


def not_finite(request: Request, index: int, place: int) -> NotFiniteError:
    """For a sample whose token at ``place`` (from 0) has a log-probability that is no number."""
    return NotFiniteError(
        f"request {request.id}, sample {index}: the model's logits at response token {place + 1} are not finite: are "
        "its weights? Where training made them so, a lower training.learning_rate or max_grad_norm may not"
    )


def _problems(request: Request, vocabulary: int, max_sequence: int, can_decode: bool) -> Iterator[str]:
    prompt, sampling = request.prompt_ids, request.sampling
    if not prompt:
        yield "the prompt is empty"
    elif max(prompt) >= vocabulary or min(prompt) < 0:
        yield f"token ids must be in 0..{vocabulary - 1}"
    if sampling.max_tokens < 1:
        yield f"max_tokens is {sampling.max_tokens}, at least 1 is needed"
    if sampling.max_tokens > (room := max_sequence - len(prompt)):
        works = (
            f"max_tokens can be {room} at most" if room > 0 else "shorten the prompt, or raise data.max_prompt_length"
        )
        asked = f"{len(prompt)} prompt tokens and up to {sampling.max_tokens} response tokens"
        yield f"{asked} exceed the engine's {max_sequence}: {works}"
    if min(request.seeds, default=0) < 0:
        yield f"a seed is {min(request.seeds)}, it must be 0 or more"
    yield from _nonsense(sampling)
    yield from _stop_problems(sampling, can_decode)


def _draft_problems(request: Request, vocabulary: int, stop_ids: Collection[int]) -> Iterator[str]:
    if request.drafts and request.sampling.top_logprobs:
        yield "top_logprobs cannot be had of a sample that is continued: a draft does not hold them"
    if len(request.fresh) + len(request.drafts) != len(request.seeds):
        yield f"drafts of samples {[d.index for d in request.drafts]}: one of each of {len(request.seeds)} is allowed"
    for draft in request.drafts:
        ids, which = draft.token_ids, f"the draft of sample {draft.index}"
        if not ids or not len(ids) == len(draft.logprobs) == len(draft.versions):
            yield f"{which} has {len(ids)} tokens, {len(draft.logprobs)} logprobs and {len(draft.versions)} versions"
        elif max(ids) >= vocabulary or min(ids) < 0:
            yield f"{which}: token ids must be in 0..{vocabulary - 1}"
        elif len(ids) >= request.sampling.max_tokens or ids[-1] in stop_ids:
            yield f"{which} is a whole response of {len(ids)} tokens: there is nothing to continue"


def _nonsense(sampling: Sampling) -> Iterator[str]:
    """Written so that not-a-number, which compares with nothing, is refused too."""
    if sampling.temperature != 0 and not LEAST_TEMPERATURE <= sampling.temperature < math.inf:
        yield f"temperature is {sampling.temperature}, it must be 0 (greedy) or at least {LEAST_TEMPERATURE}"
    if not 0 < sampling.top_p <= 1:
        yield f"top_p is {sampling.top_p}, it must be above 0 and at most 1 (off)"
    if not 0 <= sampling.min_p < 1:
        yield f"min_p is {sampling.min_p}, it must be at least 0 (off) and below 1"
    if sampling.top_k < 0:
        yield f"top_k is {sampling.top_k}, it must be 0 (off) or more"
    if not 0 <= sampling.top_logprobs <= MOST_TOP_LOGPROBS:
        yield f"top_logprobs is {sampling.top_logprobs}, it must be in 0..{MOST_TOP_LOGPROBS}"


def _stop_problems(sampling: Sampling, can_decode: bool) -> Iterator[str]:
    texts: object = sampling.stop
    if isinstance(texts, str):  # would be taken for a tuple of characters
        yield f"stop is the text {texts!r}, it must be a tuple of texts"
    elif "" in sampling.stop:
        yield "a stop text is empty, which would end every response at once"
    elif any(NO_TEXT in text for text in sampling.stop):
        yield "a stop text holds U+FFFD, which stands for bytes that are no text"
    elif sampling.stop and not can_decode:
        yield "stop texts need a tokenizer, which this engine was not given"
