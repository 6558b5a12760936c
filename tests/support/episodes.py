"""What the tests of episodes share: a tokenizer with a chat template, a scripted engine, and environments."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from dapo.config import build_config, nested
from dapo.data.template import PromptTemplate
from dapo.records import NOBODY, Sample

START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' }}{{ message.content }}\n</tool_response>"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{%- elif message.role == 'assistant' %}"
    "<|im_start|>assistant\n{{ STRIPPED }}<|im_end|>\n"
    "{%- else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML with tools, as Qwen has it."""


def chat_tokenizer(strip_thinking: bool = False, shorten: bool = False) -> Any:
    """A token for each byte. ``strip_thinking``: the template is not append-only, as it drops what stands before
    ``</think>`` in earlier answers; ``shorten``: all but the first two letters of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {one: i for i, one in enumerate(["<pad>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")
    found.add_special_tokens({"eos_token": END, "additional_special_tokens": [START]})
    said = "message.content.split('</think>')[-1]" if strip_thinking else "message.content"
    said = "message.content[:2]" if shorten else said
    found.chat_template = TEMPLATE.replace("STRIPPED", said)
    return found


def settings(**changes: Any) -> Any:
    """A recipe; ``changes`` with two underscores for each dot."""
    tree = {
        "model.path": "none",
        "data.template": "chat",
        "data.max_prompt_length": 2000,
        "rollout.max_response_length": 1500,
        "rollout.samples_per_prompt": 2,
        "rollout.prompts_per_step": 1,
        "training.groups_per_update": 1,
        "training.tokens_per_micro_batch": 20000,
        "algorithm.overlong_buffer.enable": False,
        "environment.workers": 2,
    }
    return build_config(nested(tree | {name.replace("__", "."): value for name, value in changes.items()}))


class Script:
    """An ``ask`` whose answers come from a function of the context's text and the number of the turn. It keeps what it
    was asked and what it said."""

    def __init__(self, template: PromptTemplate, answer: Callable[[str, int], str], seed: int = 0) -> None:
        self._template, self._answer, self._random = template, answer, random.Random(seed)
        self.contexts: list[tuple[int, ...]] = []
        self.samples: list[Sample] = []
        self.version = 0

    async def __call__(self, context: tuple[int, ...], turn: int, most: int) -> Sample:
        await asyncio.sleep(0)
        text = self._answer(self._template.text(context), turn)
        ids = self._template.continuing_ids(text + END)
        cut = len(ids) > most
        ids = ids[:most]
        logprobs = np.array([-self._random.random() for _ in ids], np.float32)
        self.version += self._random.random() < 0.2
        versions = np.full(len(ids), self.version, np.int32)
        sample = Sample(1, 0, np.array(ids, np.int32), logprobs, versions, "length" if cut else "stop")
        self.contexts.append(context)
        self.samples.append(sample)
        return sample


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def consistent(result: Any, script: Script, prompt: Any) -> Sample:
    """Each turn stands in the trace where it was asked for, with what the engine said of it."""
    sample = result.sample(3, 0, prompt)
    parts: list[Any] = []
    for part in sample.parts:
        ids = [*(prompt.token_ids if part.prompt_ids is None else part.prompt_ids.tolist())]
        begin = len(ids)
        ids += part.token_ids.tolist()
        for turn in part.turns:
            parts.append((tuple(ids[: begin + turn.start]), part, turn))
        sampled = np.zeros(len(part.token_ids), bool)
        for turn in part.turns:
            sampled[turn.start : turn.end] = True
        assert (part.versions[~sampled] == NOBODY).all()
        assert (part.logprobs[~sampled] == 0).all()
        assert (part.versions[sampled] != NOBODY).all()
        cut = [turn for turn in part.turns if turn.cut]
        assert part.loss_mask.sum() == sampled.sum() - sum(turn.end - turn.start for turn in cut)
    assert len(parts) == len(script.samples)
    for context, said in zip(script.contexts, script.samples, strict=True):
        ids = said.token_ids.tolist()
        found = [
            one for one in parts if one[0] == context and one[1].token_ids[one[2].start : one[2].end].tolist() == ids
        ]
        part, turn = next(one[1:] for one in found if one[1].logprobs[one[2].start] == said.logprobs[0])
        span = slice(turn.start, turn.end)
        assert part.logprobs[span].tolist() == said.logprobs.tolist()
        assert part.versions[span].tolist() == said.versions.tolist()
        assert turn.cut == said.truncated
    assert sample.length == sum(said.length for said in script.samples)
    return sample
