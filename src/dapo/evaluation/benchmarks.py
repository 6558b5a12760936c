"""Presets for public benchmarks: what goes with the problems, where the answer stands, and how one samples.

A preset is a layer of the config, so each of its keys can be overridden; and, where no key could say how, a way to read
rows as the benchmark's authors publish them. It names no data: the files are the user's. A benchmark of the user's is a
function without arguments that returns settings or a :class:`Benchmark`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dapo.config import flat, nested
from dapo.errors import ConfigError
from dapo.util.user_code import load_named, made

STEP_BY_STEP = "\nReason step by step, and put the final answer in \\boxed{}."


@dataclass(frozen=True, slots=True)
class Published:
    """Rows as a benchmark's authors publish them: the key of the prompt, and what stands before the number at the end
    of a solution, which is under the key of the answer."""

    prompt_key: str
    mark: str

    def answer(self, solution: str) -> str | None:
        """The number at the end, without commas; None: there is no mark, or nothing after it."""
        _, mark, answer = solution.rpartition(self.mark)
        return answer.strip().replace(",", "") or None if mark else None


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A preset. ``settings`` are sections and keys of the config. ``published``: None where keys of the config are
    enough to read its rows."""

    name: str
    settings: Mapping[str, Any]
    published: Published | None = None


def _preset(data: Mapping[str, Any], extract: list[str], **evaluation: Any) -> dict[str, Any]:
    return {
        "data": {**data, "system": None},
        "reward": {"kind": "math", "extract": extract},
        "evaluation": {**evaluation, "top_k": 0, "min_p": 0.0},
    }


def _boxed(max_response_length: int) -> dict[str, Any]:
    """One greedy answer in a box, after the tokenizer's own chat template if it has one."""
    sampling = {"samples_per_prompt": 1, "temperature": 0.0, "top_p": 1.0, "max_response_length": max_response_length}
    return _preset({"instruction": STEP_BY_STEP}, ["boxed", "answer_line"], **sampling)


_PAPER = _preset(
    {"template": "dapo", "instruction": ""},
    ["answer_line", "boxed"],
    **{"samples_per_prompt": 32, "temperature": 1.0, "top_p": 0.7, "max_response_length": 20480},
)
"""The DAPO paper's evaluation (section 4.1): its own template, avg@32 at temperature 1.0 with top-p 0.7."""


GSM8K = Published("question", "####")
"""Its rows have a question, and as the answer a whole solution, whose last line is "#### 72"."""

BENCHMARKS: Mapping[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("gsm8k", _boxed(1024), GSM8K),
        Benchmark("math500", _boxed(2048)),
        Benchmark("aime", _PAPER),
        Benchmark("amc", _PAPER),
    )
}


def benchmark_named(name: str) -> Benchmark:
    """One of ours, or what the user's function ``file.py:name`` returns.
    Raises ConfigError: there is none of this name, or the function fails or returns something else."""
    if ":" in name:
        own = made(f"--benchmark {name}", load_named(name, "--benchmark"), object)
        if isinstance(own, Mapping):
            own = Benchmark(name, nested(dict(flat(own))))
        if not isinstance(own, Benchmark):
            raise ConfigError(f"--benchmark {name}: returned a {type(own).__name__}; return a mapping of settings")
        return own
    found = BENCHMARKS.get(name.lower().replace("-", ""))
    if found is None:
        raise ConfigError(f"--benchmark: there is no {name!r}; there are: {', '.join(BENCHMARKS)}; or file.py:name")
    return found
