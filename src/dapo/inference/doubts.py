"""What to warn of before prompts are sampled from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from dapo.inference.model import Prompting
from dapo.records import Prompt
from dapo.util.terminal import visible


def doubts(prompting: Prompting, prompts: Mapping[str, Sequence[Prompt]]) -> Iterator[str]:
    """What to warn of: settings that a server is not told, samples that will all be the same, and letters that the
    tokenizer has no token for, so that the model does not see them. ``prompts``: by the name of where they come from;
    of many, some are looked at."""
    from dapo.checks.answers import LOOKED_AT, spread
    from dapo.data.template import lost_letters

    asked, sent = prompting.config.evaluation, json.dumps(prompting.config.rollout.request)
    if sent != "null":
        off = {"temperature": None, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        for name, value in ((name, getattr(asked, name)) for name in off):
            if value != off[name] and f"${name}" not in sent:
                yield f"rollout.request sends no ${name}: the server samples as it is set, not with {name} {value:g}"
        if asked.samples_per_prompt > 1 and "$seed" not in sent:
            yield "rollout.request sends no $seed: the samples of a prompt may be alike, and others the next time"
    if asked.samples_per_prompt > 1 and asked.temperature == 0:
        yield "at temperature 0 all samples of a prompt are alike; use a temperature of 1"
    for name, several in prompts.items():
        some = spread(several, LOOKED_AT)
        lost = [(p, letters) for p in some if (letters := lost_letters(p, prompting.tokenizer.decode))]
        if lost:
            prompt, letters = lost[0]
            which = f", {len(lost)} of {len(some)} looked at" if len(several) > 1 else ""
            yield visible(
                f"{name}, row {prompt.row + 1}{which}: the tokenizer has no token for {''.join(letters)!r}: the model "
                "does not see these letters and answers another prompt"
            )
