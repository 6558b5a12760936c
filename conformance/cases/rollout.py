"""From the model's tokens to the loss: stop tokens, padding, the limit. Refused settings. Learning rates."""

from __future__ import annotations

from conformance.case import REFUSED, Case

# token 3 starts a response of two words and a stop, token 4 one that is longer; so the first is padded in a batch
_CHAIN = {3: 7, 7: 8, 8: 2, 4: 5, 5: 6, 6: 10, 10: 11, 11: 2, 2: 12, 12: 12, 9: 12}


def _rollout(name: str, what: str, tokens: object, truncated: object, source: str, **others: object) -> Case:
    inputs = {
        "chain": _CHAIN,
        "prompts": [[3], [4]],
        "eos": [2],
        "tokenizer_eos": 2,
        "pad": 0,
        "limit": 8,
        "vocabulary": 14,
    } | others
    return Case(f"rollout/{name}", what, "rollout", inputs, {"tokens": tokens, "truncated": truncated}, source)


def _rates(name: str, what: str, rates: list[float], source: str, **others: object) -> Case:
    inputs = {"rate": 1e-6, "warmup": 0, "updates_per_step": 1, "steps": 3} | others
    return Case(f"lr/{name}", what, "learning_rates", inputs, {"rates": rates}, source, tolerance=1e-12)


def _refused(setting: str, value: float, source: str) -> Case:
    what = f"{setting.replace('_', ' ')} {value:g} is refused when the config is read"
    inputs = {"setting": setting, "value": value}
    return Case(f"config/{setting.replace('_', '-')}-{value:g}", what, "configure", inputs, REFUSED, source)


_BOTH = [[7, 8, 2], [5, 6, 10, 11, 2]]

CASES = (
    _rollout("stop-token", "the stop token is in the loss, padding is not", _BOTH, [False, False], "by construction"),
    _rollout(
        "pad-is-stop",
        "the pad token is the stop token: one stop token in the loss, and no more",
        _BOTH,
        [False, False],
        "models that never learn to stop, or train on padding: a reported fault",
        pad=2,
    ),
    _rollout(
        "second-stop-token",
        "the model names two stop tokens, the tokenizer one: either ends a response",
        [[7, 9], [5, 6, 10, 11, 2]],
        [False, False],
        "only the tokenizer's stop token was looked for: a reported fault",
        chain=_CHAIN | {7: 9},
        eos=[2, 9],
    ),
    _rollout(
        "limit",
        "cut at 4 tokens: all four are in the loss, and the response counts as truncated",
        [[7, 8, 2], [5, 6, 10, 11]],
        [False, True],
        "by construction",
        limit=4,
    ),
    _rollout(
        "stop-at-limit",
        "the stop token is the fifth of five: not truncated",
        _BOTH,
        [False, False],
        "by construction",
        limit=5,
    ),
    _rollout(
        "pad-is-stop-limit",
        "pad token = stop token, cut at 4 tokens: truncated all the same",
        [[7, 8, 2], [5, 6, 10, 11]],
        [False, True],
        "by construction",
        limit=4,
        pad=2,
    ),
    _rates(
        "no-warm-up",
        "no warm-up: the first update has the full rate",
        [1e-6] * 3,
        "a first update with rate 0: a reported fault",
    ),
    _rates(
        "warm-up",
        "warm-up over 4 rollout steps: a quarter of the rate in the first, not 0",
        [0.25e-6, 0.5e-6, 0.75e-6, 1e-6, 1e-6],
        "linear warm-up over rollout steps (DAPO section 4.1)",
        warmup=4,
        steps=5,
    ),
    _rates(
        "per-rollout-step",
        "two updates per rollout step: the rate is that of the step",
        [0.5e-6, 0.5e-6, 1e-6, 1e-6, 1e-6, 1e-6],
        "linear warm-up over rollout steps (DAPO section 4.1)",
        warmup=2,
        updates_per_step=2,
    ),
    _refused("temperature", 0.0, "greedy rollouts hold nothing to compare"),
    _refused("temperature", -0.1, "not a distribution"),
    _refused("samples_per_prompt", 1, "nothing to compare with"),
)
