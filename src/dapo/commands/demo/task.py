"""The demo's world: arithmetic modulo 10 from left to right, a character tokenizer, and a model of 0.4 M parameters.

``7*3+4-5=`` means ((7 * 3) + 4) - 5 with every intermediate result taken modulo 10, so 0. A response either works it
out step by step and then answers, ``7*3=1;1+4=5;5-5=0;#0``, or jumps to an answer, ``#0``. What follows the last ``#``
is the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

ANSWER_MARK = "#"
OPERATORS = "+-*"
CHARACTERS = "0123456789" + OPERATORS + "=;" + ANSWER_MARK
PAD, END = "<pad>", "<end>"


@dataclass(frozen=True, slots=True)
class Expression:
    operands: tuple[int, ...]
    operators: tuple[str, ...]

    @property
    def prompt(self) -> str:
        first, *others = self.operands
        return str(first) + "".join(f"{op}{n}" for op, n in zip(self.operators, others, strict=True)) + "="

    @property
    def steps(self) -> list[str]:
        """Each step as ``a op b=c;``."""
        done, result = [], self.operands[0]
        for operator, operand in zip(self.operators, self.operands[1:], strict=True):
            value = {"+": result + operand, "-": result - operand, "*": result * operand}[operator] % 10
            done.append(f"{result}{operator}{operand}={value};")
            result = value
        return done

    @property
    def answer(self) -> str:
        return self.steps[-1][-2]

    def response(self, think: bool) -> str:
        return ("".join(self.steps) if think else "") + ANSWER_MARK + self.answer


def draw_expressions(rng: np.random.Generator, count: int, taken: set[str], operators: range) -> list[Expression]:
    """``count`` different expressions, with so many operators, that are not in ``taken``, which they are added to."""
    found: list[Expression] = []
    while len(found) < count:
        size = int(rng.integers(operators.start, operators.stop))
        expression = Expression(
            tuple(int(n) for n in rng.integers(0, 10, size + 1)),
            tuple(OPERATORS[i] for i in rng.integers(0, len(OPERATORS), size)),
        )
        if expression.prompt not in taken:
            taken.add(expression.prompt)
            found.append(expression)
    return found


def make_tokenizer() -> Any:
    """One token per character; ``<end>`` ends a response. Built with the tokenizers library, nothing downloaded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, END, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)


def make_model(seed: int, vocabulary: int) -> Any:
    """A Qwen2-architecture model of about 0.4 M parameters with random weights.

    Two settings are made for its size and its short texts, and decide whether the warm-up learns to copy operands
    within a minute or, with some seeds, not at all (docs/decisions/0007-demo.md): initial weights as wide as its width
    asks for, and position frequencies that tell neighbours apart."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=128,
        initializer_range=0.08,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)
