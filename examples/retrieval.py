"""Gaps in documents: the model searches, reads and answers. The documents are those of this repository.

python examples/retrieval.py > questions.jsonl
dapo generate MODEL --data questions.jsonl --environment examples/retrieval.py:Library
"""

import json
import math
import re
from collections import Counter
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs"


class Library:
    def reset(self, answer, **row):
        self.answer = answer

    def search(self, query: str) -> str:
        """Find passages. Returns the best five, each with its number and its first words.

        Args:
            query: Words that the passage should have.
        """
        wanted = set(words(query))
        passages, rarity = library()
        scores = [sum(rarity.get(word, 0.0) for word in wanted & set(words(text))) for _, text in passages]
        best = sorted(range(len(passages)), key=lambda i: -scores[i])[:5]
        return "\n".join(f"{i}: {passages[i][0]}: {passages[i][1][:80]!r}" for i in best if scores[i])

    def read(self, number: int) -> str:
        """Read a passage.

        Args:
            number: That the search has given.
        """
        return library()[0][number][1]

    def reward(self, response):
        right = self.answer.lower() in response.lower() and len(response) < 200
        return {"value": 1.0 if right else -1.0, "correct": right}


def words(text: str) -> list[str]:
    return re.findall(r"[a-z_]{3,}", text.lower())


@cache
def library():
    """Passages with the names of their files, and how rare each word is in them."""
    found = [
        (path.name, passage.strip())
        for path in sorted(FOLDER.glob("*.md"))
        for passage in path.read_text(encoding="utf-8").split("\n\n")
        if 40 < len(passage) < 800 and not passage.strip().startswith(("|", "#"))
    ]
    counts = Counter(word for _, text in found for word in set(words(text)))
    return found, {word: math.log(len(found) / count) for word, count in counts.items()}


def rows():
    """Sentences of the documents with a gap, where a name stood that is theirs alone."""
    passages, _ = library()
    for _, text in passages:
        for sentence in re.split(r"(?<=[.;:]) ", " ".join(text.split())):
            names = re.findall(r"`([a-z_.]{4,30})`", sentence)
            if len(names) == 1 and len(sentence) > 60:
                gap = sentence.replace(f"`{names[0]}`", "____")
                yield {"prompt": f"Search the documents: which name stands in the gap?\n{gap}", "answer": names[0]}


if __name__ == "__main__":
    for row in rows():
        print(json.dumps(row))
