"""``dapo generate``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dapo.commands.shared import options
from dapo.errors import ConfigError, DataError
from dapo.util.terminal import Terminal, counted

if TYPE_CHECKING:
    from dapo.inference.generate import Response


Prompts = Annotated[
    list[str] | None, typer.Argument(metavar="[PROMPT ...]", help="Prompts; - reads one from standard input.")
]
Data = Annotated[str | None, typer.Option(metavar="FILE", help="Take the prompts from the rows of this file.")]
Template = Annotated[
    str | None,
    typer.Option(
        metavar="plain|chat|dapo",
        help="By default the recipe's for a run of dapo, else chat if the tokenizer has one, else plain.",
    ),
]
Likeliest = Annotated[
    int,
    typer.Option(
        metavar="N", min=0, max=20, help="With --json: log-probabilities of each token and of the N likeliest."
    ),
]


def generate(
    model: options.Model,
    prompts: Prompts = None,
    data: Data = None,
    samples: Annotated[int | None, typer.Option(metavar="N", help="Responses to each prompt.")] = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    max_tokens: options.MaxTokens = None,
    stop: options.Stop = None,
    seed: Annotated[int | None, typer.Option(help="Of sampling.")] = None,
    system: Annotated[str | None, typer.Option(help="System message (templates chat and dapo).")] = None,
    template: Template = None,
    settings: options.Settings = None,
    environment: Annotated[
        str | None, typer.Option(metavar="NAME", help="Play an episode in this environment, such as file.py:Class.")
    ] = None,
    top_logprobs: Likeliest = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the responses only.")] = False,
) -> None:
    """Print what MODEL says to each PROMPT.

    Sampling is greedy unless a temperature is given (or the recipe of the run names one for evaluation).
    """
    from dapo.config.plan import require_files
    from dapo.inference.model import ONE_EACH, settings_for
    from dapo.observe.progress import make_listener

    if top_logprobs and not as_json:
        raise ConfigError("--top-logprobs: are written as JSON only; add --json")
    texts = _texts(prompts or [], data)
    given = options.given_options(locals(), *options.SAMPLING, "data", "seed", "system", "environment", "template")
    _, config = settings_for(model, given, ONE_EACH, overrides=settings or [])
    require_files(config)
    with closing(make_listener(quiet, Terminal(stderr=True))) as listener:
        if environment is not None:
            from dapo.inference.episodes import generate_episodes

            return generate_episodes(config, texts, listener, _print_line if as_json else _print_episode)
        from dapo.inference.generate import generate_responses

        several = len(texts) + (data is not None)
        show = (lambda one: _print_line(one.as_json())) if as_json else _printer(several, config)
        generate_responses(config, texts, listener, show, top_logprobs)


def _texts(prompts: Sequence[str], data: str | None) -> list[str]:
    """Raises ConfigError if there is nothing to generate from, and DataError if a prompt is empty."""
    if not prompts and data is None:
        raise ConfigError("nothing to generate from: give a PROMPT, - for standard input, or --data FILE")
    if prompts.count("-") > 1:
        raise ConfigError("-: standard input can be read only once")
    from dapo.config.messages import all_keys

    for prompt in prompts:
        if "=" in prompt and prompt.partition("=")[0] in all_keys():
            raise ConfigError(
                f"the prompt {prompt!r} reads like a setting; give settings with --set {shlex.quote(prompt)}"
            )
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
    if not all(texts):
        raise DataError("a prompt is empty" + ("; nothing came from standard input" if "-" in prompts else ""))
    return texts


def _print_line(line: Mapping[str, Any]) -> None:
    from dapo.util.files import json_line

    print(json_line(line), end="", flush=True)


def _print_episode(line: Mapping[str, Any]) -> None:
    from dapo.commands.inspect.sample_report import episode_pieces, text_lines

    for label, text in [("prompt", line["prompt"]), *episode_pieces(line)]:
        print("\n".join(text_lines(label, text, 100, True)))
    reward = f"none: {line['error']}" if line["reward"] is None else f"{line['reward']:+g}"
    print(f"  reward   | {reward}\n", flush=True)


def _printer(prompts: int, config: Any) -> Any:
    """One response alone is printed as it is, so that it can be piped on; several get a line above each."""
    several = prompts > 1 or config.evaluation.samples_per_prompt > 1

    def show(response: Response) -> None:
        if several:
            cut = "" if response.finish_reason == "stop" else ", cut at the limit"
            place = f"prompt {response.prompt_number}, sample {response.sample_number}"
            print(f"--- {place}: {counted(response.tokens, 'token')}{cut}")
        print(response.text, flush=True)

    return show
