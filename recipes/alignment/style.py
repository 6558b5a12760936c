"""A reader who asks a running ``dapo serve --live``: python recipes/alignment/style.py URL MODEL [vote].

The reader is a program, and likes to see the steps of a calculation. With ``vote`` it gives thumbs on what it asked;
without, it asks other questions, and says how many answers were to its taste. URL ends in /v1.
"""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx

SAMPLES = 4


def liked(answer: str) -> bool:
    return answer.count("=") >= 2


def main(url: str, model: str, what: str = "") -> None:
    rng = random.Random(what)
    prompts = [f"{rng.randrange(10)}+{rng.randrange(10)}*{rng.randrange(10)}=" for _ in range(16 if what else 40)]
    with httpx.Client(base_url=url, timeout=600) as client, ThreadPoolExecutor(8) as pool:

        def ask(prompt: str) -> str:
            body = {"model": model, "prompt": prompt, "max_tokens": 32, "metadata": {"consent": "training"}}
            reply = client.post("completions", json=body).raise_for_status().json()
            answer = str(reply["choices"][0]["text"])
            if what == "vote":
                thumb = {"id": reply["id"], "thumbs": 1 if liked(answer) else -1}
                client.post("feedback", json=thumb).raise_for_status()
            return answer

        answers = list(pool.map(ask, [prompt for prompt in prompts for _ in range(SAMPLES)]))
    share = sum(map(liked, answers)) / len(answers)
    print(f"{model}: {share:.0%} of {len(answers)} answers show the steps; the first one: {answers[0]!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
