"""A reader with a taste, who asks a running ``dapo serve --live`` and gives thumbs: python recipes/alignment/style.py URL MODEL.

The reader is a program: it likes answers of one sentence. ``vote`` behind that: asks the first questions and gives thumbs.
Without it: asks the others, and says how many answers are to its taste. URL ends in /v1.
"""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx

THINGS = (
    *("a comet", "a glacier", "a sonnet", "yeast", "a mortgage", "a fjord", "jazz", "a compass", "a tariff", "salt"),
    *("a volcano", "a haiku", "a magnet", "a monsoon", "rust", "a bicycle", "a vaccine", "chess", "a coral reef", "tea"),
    *("an echo", "a passport", "a battery", "an orchid", "a satellite", "a harbour", "a ballad", "a lens", "silk", "fog"),
    *("a canyon", "a lullaby"),
)
SAMPLES = 4


def liked(answer: str) -> bool:
    """One whole sentence, and nothing else."""
    return len(re.findall(r"[.!?](?:\s|$)", answer.strip())) == 1 and answer.strip()[-1:] in ".!?"


def main(url: str, model: str, what: str = "") -> None:
    things = THINGS[:20] if what == "vote" else THINGS[20:]
    with httpx.Client(base_url=url, timeout=600) as client, ThreadPoolExecutor(8) as pool:

        def ask(thing: str) -> str:
            said = [{"role": "user", "content": f"What is {thing}?"}]
            body = {"model": model, "messages": said, "max_tokens": 64, "metadata": {"consent": "training"}}
            reply = client.post("chat/completions", json=body).raise_for_status().json()
            answer = str(reply["choices"][0]["message"]["content"])
            if what == "vote":
                thumb = {"id": reply["id"], "thumbs": 1 if liked(answer) else -1}
                client.post("feedback", json=thumb).raise_for_status()
            return answer

        answers = list(pool.map(ask, [thing for thing in things for _ in range(SAMPLES)]))
    share = sum(map(liked, answers)) / len(answers)
    words = sum(len(one.split()) for one in answers) / len(answers)
    print(f"{model}: {share:.0%} of {len(answers)} answers are one sentence; {words:.1f} words on average; first: {answers[0]!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
