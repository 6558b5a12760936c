"""What all sides are given to do, what it costs at least, and what the card can do. Imports no engine or trainer."""

from __future__ import annotations

import json
import random
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from math import ceil
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

LENGTHS = Path(__file__).with_name("response_lengths.json")
"""Lengths of real responses: ``lengths`` of the first record ``rollout`` in ours.jsonl of a real rollout."""
WARM_TOKENS = 2**15
"""Tokens of prompts in a warm-up: a few of the passes that engines read prompts in."""
REWARD_WORKERS = 4
"""Processes of the math reward, on both sides."""
INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Qwen2 model, by the names of ``config.json``."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool

    @classmethod
    def read(cls, folder: str | Path) -> Shape:
        """That of the model in a folder."""
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        found = {"num_key_value_heads": heads, "tie_word_embeddings": False} | config | {"head_dim": head_dim}
        return cls(**{name: found[name] for name in cls.__dataclass_fields__})

    def write(self, folder: Path) -> Path:
        """A folder with a ``config.json`` and no weights, which every engine can read."""
        config = asdict(self) | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu"}
        config |= {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
        config |= {"torch_dtype": "bfloat16", "use_sliding_window": False}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        return folder

    @property
    def name(self) -> str:
        """As in ``SHAPES``, or the number of parameters."""
        named = {shape: name for name, shape in SHAPES.items()}
        return named.get(self, f"{self.parameters / 1e6:.0f}M")

    @property
    def layer_parameters(self) -> int:
        """All parameters but embeddings and head."""
        kv, q = self.num_key_value_heads * self.head_dim, self.num_attention_heads * self.head_dim
        attention = self.hidden_size * (2 * q + 2 * kv) + q + 2 * kv  # with the biases of queries, keys and values
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        return self.num_hidden_layers * layer + self.hidden_size

    @property
    def table_parameters(self) -> int:
        """Parameters of the embeddings, and as many of the head."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        return self.layer_parameters + self.table_parameters * (1 if self.tie_word_embeddings else 2)

    @property
    def used_parameters(self) -> int:
        """Parameters that a decode step reads and multiplies by: layers and head."""
        return self.layer_parameters + self.table_parameters

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of one token in bfloat16."""
        return 2 * 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim


SHAPES = {
    "0.5b": Shape(24, 896, 14, 2, 64, 4864, 151936, True),
    "1.5b": Shape(28, 1536, 12, 2, 128, 8960, 151936, True),
    "7b": Shape(28, 3584, 28, 4, 128, 18944, 152064, False),
    "tiny": Shape(2, 32, 4, 2, 8, 64, 64, True),
}
"""Those of Qwen2.5, and one for tests."""


# --- the least that the work costs ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a card: bytes a second of a copy, read and written, and operations a second of a matrix product."""

    device: str
    bytes_per_second: float
    operations_per_second: float

    @property
    def peak(self) -> Limits | None:
        """What the maker states of this card; None: nothing that is known here."""
        from dapo.orchestrator.mfu import card_named

        card = card_named(self.device)
        return card and Limits(self.device, card.bytes, card.operations)


def measure_limits(device: str) -> Limits:
    """Medians of a copy of 1 GiB and of a product of 8192 x 8192 bfloat16 matrices (on a CPU small float32 ones)."""
    import torch

    cuda = torch.device(device).type == "cuda"
    size, side, dtype = (2**30, 8192, torch.bfloat16) if cuda else (2**24, 1024, torch.float32)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = _median_seconds(lambda: target.copy_(source), cuda)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product = _median_seconds(lambda: left @ right, cuda)
    name = torch.cuda.get_device_name() if cuda else "CPU"
    return Limits(name, 2 * size / copy, 2 * side**3 / product)


def _median_seconds(action: Callable[[], Any], cuda: bool, repeats: int = 20) -> float:
    import torch

    for _ in range(3):
        action()
    if not cuda:
        times = [time.perf_counter()]
        for _ in range(repeats):
            action()
            times.append(time.perf_counter())
        return median(b - a for a, b in pairwise(times))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        action()
        event.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(events)) / 1000


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes that have to be moved and operations that have to be done."""

    bytes: float
    operations: float

    def shares(self, measured: Limits | None, seconds: float) -> dict[str, float]:
        """The cost, and the shares that doing it in so many seconds reaches of the card's limits, as far as they are
        known: of those measured, and of its maker's (``peak``)."""
        found = asdict(self)
        for peak, limits in (("", measured), ("peak_", measured and measured.peak)):
            if limits:
                found[f"share_of_{peak}bytes"] = self.bytes / limits.bytes_per_second / seconds
                found[f"share_of_{peak}operations"] = self.operations / limits.operations_per_second / seconds
        return found


def step_cost(shape: Shape, rows: int, context: float) -> Cost:
    """One decode step of ``rows`` sequences that each attend to ``context`` tokens, in bfloat16.

    Bytes: weights once, every row's keys and values read and the new ones written, float32 logits written and read.
    """
    return Cost(
        bytes=2 * shape.used_parameters + rows * (context + 1) * shape.kv_bytes + 2 * 4 * rows * shape.vocab_size,
        operations=rows * _token_operations(shape, context),
    )


def rollout_cost(shape: Shape, lengths: Sequence[tuple[int, int]], prompts: Sequence[int], rows: int) -> Cost:
    """A whole rollout, counted in the same way, in the fewest steps there can be: all rows full, or the longest
    response.

    Args:
        shape: of the model.
        lengths: prompt and response tokens of every sample.
        prompts: tokens of every prompt, each computed once.
        rows: sequences decoded at once.
    """
    tokens = sum(response for _, response in lengths)
    steps = max(ceil(tokens / rows), max(response for _, response in lengths))
    contexts = sum(response * (prompt + response / 2) for prompt, response in lengths)
    return Cost(
        bytes=2 * steps * shape.used_parameters
        + (contexts + tokens + sum(prompts)) * shape.kv_bytes
        + 2 * 4 * tokens * shape.vocab_size,
        operations=tokens * _token_operations(shape, contexts / tokens)
        + sum(p * (_token_operations(shape, p / 2) - 2 * shape.table_parameters) for p in prompts),
    )


def _token_operations(shape: Shape, context: float) -> float:
    attention = 4 * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim * context
    return 2 * shape.used_parameters + attention


def training_operations(shape: Shape, computed: int, predicted: int) -> float:
    """6 operations for each parameter and token: 2 forward, 4 backward. The layers see every token that is computed,
    the head those that are predicted; looking up embeddings costs nothing. Attention is not counted."""
    return 6.0 * (shape.layer_parameters * computed + shape.table_parameters * predicted)


# --- rollouts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rollout:
    """``samples`` responses to each of ``prompts`` (token ids), at most ``limits[i]`` tokens each.

    ``random``: the folder ``model`` holds no weights; any will do. Without ``stop_ids`` nothing but the limit ends a
    response. ``concurrent``: sequences at once in our engine; vLLM's is among its settings.
    """

    model: str
    random: bool
    prompts: list[list[int]]
    limits: list[int]
    samples: int
    stop_ids: list[int]
    temperature: float
    concurrent: int
    device: str
    dtype: str

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and response together."""
        return max(len(p) + n for p, n in zip(self.prompts, self.limits, strict=True))

    def warmup(self, tokens: int = 16) -> Rollout:
        """A short rollout of the same size, of other prompts: a cache of prompts must not find them again. Prompts are
        cut where those before them hold ``WARM_TOKENS``: for kernels and graphs it takes no more."""
        before = accumulate((len(p) for p in self.prompts), initial=0)
        prompts = [p[::-1] if n < WARM_TOKENS else p[:16][::-1] for n, p in zip(before, self.prompts, strict=False)]
        return replace(self, prompts=prompts, limits=[min(n, tokens) for n in self.limits])

    def first_token(self) -> Rollout:
        return replace(self, prompts=self.prompts[:1], limits=[1], samples=1)


def warmups(works: Sequence[Rollout]) -> list[Rollout]:
    """A short rollout for all works of the same prompts."""
    first = [work for i, work in enumerate(works) if all(work.prompts != other.prompts for other in works[:i])]
    return [work.warmup() for work in first]


def drawn_lengths(count: int) -> list[tuple[int, int]]:
    """Prompt and response tokens of ``count`` real responses: quantiles of the committed list, in a fixed order.

    So any number of them is distributed like the whole list.
    """
    pairs = sorted(json.loads(LENGTHS.read_text(encoding="utf-8"))["lengths"], key=lambda pair: (pair[1], pair[0]))
    chosen = [tuple(pairs[int((i + 0.5) * len(pairs) / count)]) for i in range(count)]
    random.Random(0).shuffle(chosen)
    return chosen


def random_prompts(lengths: Iterable[int], vocabulary: int) -> list[list[int]]:
    """Token ids without meaning."""
    draw = random.Random(0)
    return [[draw.randrange(vocabulary) for _ in range(length)] for length in lengths]


# --- training ---------------------------------------------------------------------------------------------------------


Groups = list[tuple[list[int], list[list[int]]]]
"""For each group the prompt's token ids, and those of each response. Tokens mean nothing."""


def make_groups(groups: int, samples: int, vocabulary: int, limit: int) -> Groups:
    """Groups with the lengths of real prompts and responses, cut at ``limit``; tokens are below ``vocabulary``."""
    draw = random.Random(0)
    lengths = drawn_lengths(groups * samples)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(max(1, min(count, limit)))]

    mine = [lengths[g * samples : (g + 1) * samples] for g in range(groups)]
    return [(tokens(pairs[0][0]), [tokens(response) for _, response in pairs]) for pairs in mine]


def sizes_of(groups: Groups) -> dict[str, int]:
    """Numbers of sequences and tokens; ``shared_tokens`` counts the prompt of a group once, and ``response_tokens`` go
    through the head."""
    responses = sum(len(response) for _, several in groups for response in several)
    return {
        "sequences": sum(len(several) for _, several in groups),
        "tokens": sum(len(prompt) * len(several) for prompt, several in groups) + responses,
        "shared_tokens": sum(len(prompt) for prompt, _ in groups) + responses,
        "response_tokens": responses,
    }


@dataclass(frozen=True, slots=True)
class Task:
    """Cycles of rollout, reward, updates and hand-over, dynamic sampling off: sizes, limits and optimizer.

    ``model``: a folder, or ``demo``. ``rows``: file of prompts and answers, which the math reward judges; without,
    made up expressions, and a verdict that is a hash of the response. ``natural``: the model ends its responses;
    otherwise only the limit does. ``overlong``: tokens of the punished end of a response; 0: none is punished.
    ``longest_prompt``: 0: that of the longest row, and a forward pass of ours takes the whole batch. ``dtype``: of
    compute. ``threads``: 0: as many as the library takes.
    """

    model: str
    rows: str | None = None
    natural: bool = True
    prompts: int = 128
    samples: int = 16
    updates: int = 4
    limit: int = 768
    overlong: int = 128
    longest_prompt: int = 512
    learning_rate: float = 1e-6
    warmup_rollouts: int = 0
    weight_decay: float = 0.1
    temperature: float = 1.0
    seed: int = 1
    shuffle: bool = True
    device: str = "cuda"
    dtype: str = "bfloat16"
    threads: int = 0
    concurrent: int = 1024
    micro_tokens: int = 32768
    warmup: int = 1
    cycles: int = 5

    @property
    def batch(self) -> int:
        return self.prompts * self.samples

    @property
    def rollouts(self) -> int:
        """Cycles, those that do not count included."""
        return self.warmup + self.cycles


_KEYS = """seed=seed model=model.path dtype=model.compute_dtype device=runtime.device shuffle=data.shuffle
    longest_prompt=data.max_prompt_length prompts=rollout.prompts_per_step samples=rollout.samples_per_prompt
    limit=rollout.max_response_length temperature=rollout.temperature concurrent=rollout.max_concurrent_samples
    learning_rate=training.learning_rate warmup_rollouts=training.warmup_steps weight_decay=training.weight_decay
    micro_tokens=training.tokens_per_micro_batch"""
KEYS = dict(pair.split("=") for pair in _KEYS.split())
"""What of a task is a key of a recipe as it is."""


def task_of(config: Any, rows: Path) -> Task:
    """What a recipe's ``Config`` asks for, as far as a peer can do it."""
    same = {name: attrgetter(key)(config) for name, key in KEYS.items()}
    same["device"] = "cuda" if same["device"] == "cuda" else "cpu"
    overlong = config.algorithm.overlong_buffer
    return Task(
        rows=str(rows), updates=config.updates_per_step, overlong=overlong.len if overlong.enable else 0, **same
    )


def verdict(text: str) -> bool:
    """Right or wrong by a hash of the response: groups are mixed, whatever the model."""
    return zlib.crc32(text.encode()) % 2 == 0
