"""What both sides of ``bench/train.py`` are given to train on, and the operations that it takes at least."""

from __future__ import annotations

import random
from dataclasses import dataclass

from rollout_work import Shape, drawn_lengths


@dataclass(frozen=True, slots=True)
class Sequences:
    """Groups of samples: for each group the prompt's token ids, and those of each response. Tokens mean nothing."""

    groups: tuple[tuple[list[int], list[list[int]]], ...]

    @property
    def samples(self) -> int:
        """All responses."""
        return sum(len(responses) for _, responses in self.groups)

    @property
    def tokens(self) -> int:
        """Of all sequences, each with its own copy of its prompt."""
        return sum(len(prompt) * len(responses) for prompt, responses in self.groups) + self.response_tokens

    @property
    def shared_tokens(self) -> int:
        """Of all sequences, the prompt of a group counted once."""
        return sum(len(prompt) for prompt, _ in self.groups) + self.response_tokens

    @property
    def response_tokens(self) -> int:
        """Of all responses: these go through the output head."""
        return sum(len(response) for _, responses in self.groups for response in responses)


def make_sequences(groups: int, samples: int, vocabulary: int, limit: int, fixed: bool = False) -> Sequences:
    """Groups with the lengths of real prompts and responses.

    Args:
        groups: how many.
        samples: of each.
        vocabulary: tokens are drawn from it.
        limit: longer prompts and responses are cut there.
        fixed: all responses have ``limit`` tokens.
    """
    draw = random.Random(0)
    lengths = drawn_lengths(groups * samples)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(max(1, min(count, limit)))]

    made = []
    for g in range(groups):
        mine = lengths[g * samples : (g + 1) * samples]
        made.append((tokens(mine[0][0]), [tokens(limit if fixed else response) for _, response in mine]))
    return Sequences(tuple(made))


def training_operations(shape: Shape, computed: int, predicted: int) -> float:
    """6 operations for each parameter and token: 2 forward, 4 backward. The layers see every token that is computed,
    the head those that are predicted; looking up embeddings costs nothing. Attention is not counted."""
    table = shape.vocabulary * shape.hidden
    layers = shape.parameters - table * (1 if shape.tied else 2)
    return 6.0 * (layers * computed + table * predicted)
