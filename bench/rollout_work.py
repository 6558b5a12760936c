"""What both sides of ``bench/rollout.py`` are given to do, and what it costs at least. Imports neither engine."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, TextIO

LENGTHS = Path(__file__).with_name("response_lengths.json")
INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Qwen2 model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    tied: bool

    @classmethod
    def read(cls, folder: str | Path) -> Shape:
        """That of the model in a folder (``config.json``)."""
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        heads = config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            mlp=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings")),
        )

    def write(self, folder: Path) -> Path:
        """A folder with a ``config.json`` and no weights, which both engines can read."""
        config = {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "max_position_embeddings": 32768,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vocab_size": self.vocabulary,
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        return folder

    @property
    def parameters(self) -> int:
        """All of them, tied ones once."""
        kv, q = self.kv_heads * self.head_dim, self.heads * self.head_dim
        attention = self.hidden * (2 * q + 2 * kv) + q + 2 * kv  # with the biases of queries, keys and values
        layer = attention + 3 * self.hidden * self.mlp + 2 * self.hidden
        return self.layers * layer + self.hidden + self._table * (1 if self.tied else 2)

    @property
    def used_parameters(self) -> int:
        """Those that a decode step reads and multiplies by: all but an embedding that is not the head as well."""
        return self.parameters - (0 if self.tied else self._table)

    @property
    def kv_bytes(self) -> int:
        """Of the keys and values of one token in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def _table(self) -> int:
        return self.vocabulary * self.hidden


SHAPES = {
    "0.5b": Shape(24, 896, 14, 2, 64, 4864, 151936, tied=True),
    "1.5b": Shape(28, 1536, 12, 2, 128, 8960, 151936, tied=True),
    "7b": Shape(28, 3584, 28, 4, 128, 18944, 152064, tied=False),
    "tiny": Shape(2, 32, 4, 2, 8, 64, 64, tied=True),
}
"""Those of Qwen2.5, and one for tests."""


# --- the least that the work costs ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """What the card was measured to do: bytes a second of a copy, read and written, and operations a second of a
    bfloat16 matrix product."""

    device: str
    bytes_per_second: float
    operations_per_second: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes that have to be moved and operations that have to be done."""

    bytes: float
    operations: float

    def seconds(self, limits: Limits) -> tuple[float, float]:
        """What bytes alone and operations alone would take at the card's measured limits."""
        return self.bytes / limits.bytes_per_second, self.operations / limits.operations_per_second


def step_cost(shape: Shape, rows: int, context: float) -> Cost:
    """One decode step of ``rows`` sequences that each attend to ``context`` tokens, in bfloat16.

    Bytes: weights once, every row's keys and values read and the new ones written, float32 logits written and read.
    """
    return Cost(
        bytes=2 * shape.used_parameters + rows * (context + 1) * shape.kv_bytes + 2 * 4 * rows * shape.vocabulary,
        operations=rows * _token_operations(shape, context),
    )


def rollout_cost(shape: Shape, lengths: Sequence[tuple[int, int]], prompts: Sequence[int], rows: int) -> Cost:
    """A whole rollout, by the same count, in the fewest steps there can be: all rows full, or the longest response.

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
        + 2 * 4 * tokens * shape.vocabulary,
        operations=tokens * _token_operations(shape, contexts / tokens)
        + sum(p * (_token_operations(shape, p / 2) - 2 * shape.vocabulary * shape.hidden) for p in prompts),
    )


def _token_operations(shape: Shape, context: float) -> float:
    return 2 * shape.used_parameters + 4 * shape.layers * shape.heads * shape.head_dim * context


# --- the work ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """A rollout: ``samples`` responses to each of ``prompts`` (token ids), at most ``limits[i]`` tokens each.

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

    def warmup(self, tokens: int = 16) -> Work:
        """A short rollout of the same size, of other prompts: a cache of prompts must not find them again."""
        changed = asdict(self) | {
            "prompts": [p[::-1] for p in self.prompts],
            "limits": [min(n, tokens) for n in self.limits],
        }
        return Work(**changed)


def drawn_lengths(count: int) -> list[tuple[int, int]]:
    """Prompt and response tokens of ``count`` real responses: quantiles of the committed list, in a fixed order.

    So any number of them is distributed like the whole list.
    """
    pairs = sorted(json.loads(LENGTHS.read_text(encoding="utf-8"))["lengths"], key=lambda pair: (pair[1], pair[0]))
    chosen = [tuple(pairs[int((i + 0.5) * len(pairs) / count)]) for i in range(count)]
    random.Random(0).shuffle(chosen)
    return chosen


def random_prompts(lengths: Iterable[int], vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Token ids without meaning."""
    draw = random.Random(seed)
    return [[draw.randrange(vocabulary) for _ in range(length)] for length in lengths]


def steady_works(job: dict[str, Any], vocabulary: int, rows: int, context: int) -> tuple[Work, Work]:
    """Two rollouts that differ by ``steps`` decode steps, at ``context`` tokens in the mean; every row has a prompt
    of its own."""
    lead, steps = job["lead"], job["steps"]
    length = max(1, context - lead - steps // 2)
    prompts = random_prompts([length] * rows, vocabulary)
    common = (1, [], 1.0, rows, job["device"], job["dtype"])
    short = Work(job["model"], True, prompts, [lead] * rows, *common)
    return short, replace(short, limits=[lead + steps] * rows)


def steady_result(seconds: dict[str, list[float]], rows: int, steps: int) -> dict[str, Any]:
    """Seconds of a step: the difference of the medians. What is common to both, prefill first, cancels out."""
    step = (median(seconds["long"]) - median(seconds["short"])) / steps
    return {"step_seconds": step, "tokens_per_second": rows / step, "seconds": seconds}


# --- what a side reports ----------------------------------------------------------------------------------------------


class Report:
    """JSON lines in a file: a side that fails later has still said what it found."""

    def __init__(self, path: str) -> None:
        self._file: TextIO = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  (open as long as the process)

    def say(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"kind": kind, "time": time.time(), **values}) + "\n")
        self._file.flush()
