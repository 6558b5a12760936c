"""``dapo quantise``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dapo.commands.shared import options


def quantise(
    model: options.Model,
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the quantised model.")],
    data: Annotated[
        list[str], typer.Option(metavar="FILE", help="Rows to compare on: prompts; for a reward model with responses.")
    ],
    kind: Annotated[str, typer.Option(metavar="int8|int4|nf4", help="4 bits need a GPU.")] = "int8",
    rows: Annotated[int, typer.Option(min=1, metavar="N", help="Compare on the first so many.")] = 32,
) -> None:
    """Write MODEL, a policy or a reward model, with weights of 8 or 4 bits, and say what that costs and saves.

    The result loads in Transformers and vLLM; a reward model ranks as before: dapo rank OUT.
    """
    from dapo.inference.found_model import find_model
    from dapo.ranking.quantise import quantise
    from dapo.ranking.rows import read_candidates
    from dapo.ranking.score import is_reward_model

    found = read_candidates(data, rows, bare=not is_reward_model(find_model(str(model)).path))[:rows]
    texts = [text for row in found if (text := row.prompt_text + "".join(row.texts[:1]))]
    told = quantise(str(model), output, kind, texts)
    (before, after), (small, every), (slow, fast) = told["mib"], told["layers"], told["seconds"]
    print(f"{before:.0f} MiB of weights became {after:.0f}, in {small} of {every} linear layers")
    print(f"{slow:.3f} s for a text became {fast:.3f}")
    print(f"logits moved by {told['mean_change']:.4f} on average, where they spread by {told['spread']:.4f}")
    if "same_token" in told:
        print(f"the likeliest token stayed the same in {told['same_token']:.1%} of places")
