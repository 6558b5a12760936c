"""vLLM's side of ``bench/rollout.py``: a process that does one job and reports JSON lines. Needs nothing of dapo.

A setting is named by what differs from vLLM's defaults, joined by ``+``, such as ``graphs1024+flat+nodetok``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollout_work import Report, Shape, Work, steady_result, steady_works


@dataclass(frozen=True, slots=True)
class Setting:
    """What differs from the defaults: arguments of ``LLM``, its ``compilation_config``, arguments of
    ``SamplingParams`` and environment variables."""

    engine: dict[str, Any] = field(default_factory=dict)
    compilation: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


PARTS: dict[str, Setting] = {
    "defaults": Setting(),
    "async": Setting(engine={"async_scheduling": True}),
    "sync": Setting(engine={"async_scheduling": False}),
    "graphs1024": Setting(compilation={"max_cudagraph_capture_size": 1024}),
    "graphs2048": Setting(compilation={"max_cudagraph_capture_size": 2048}),
    "full": Setting(compilation={"cudagraph_mode": "FULL"}),
    "fulldecode": Setting(compilation={"cudagraph_mode": "FULL_DECODE_ONLY"}),
    "piecewise": Setting(compilation={"cudagraph_mode": "PIECEWISE"}),
    "seqs256": Setting(engine={"max_num_seqs": 256}),
    "seqs512": Setting(engine={"max_num_seqs": 512}),
    "seqs1024": Setting(engine={"max_num_seqs": 1024}),
    "seqs2048": Setting(engine={"max_num_seqs": 2048}),
    "stats": Setting(engine={"disable_log_stats": False}),
    "nostats": Setting(engine={"disable_log_stats": True}),  # also the default of LLM
    "nodetok": Setting(sampling={"detokenize": False}),
    "flat": Setting(sampling={"flat_logprobs": True}),  # log-probs in arrays, not one object a token
    "mem80": Setting(engine={"gpu_memory_utilization": 0.8}),
    "mem95": Setting(engine={"gpu_memory_utilization": 0.95}),
    "throughput": Setting(engine={"performance_mode": "throughput"}),
    "inprocess": Setting(environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
    "runner1": Setting(environment={"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "runner2": Setting(environment={"VLLM_USE_V2_MODEL_RUNNER": "1"}),
}


def named(name: str) -> Setting:
    """The setting of a name.

    Raises:
        ValueError: a part of it is unknown.
    """
    unknown = [part for part in name.split("+") if part not in PARTS]
    if unknown:
        raise ValueError(f"unknown vLLM setting {unknown[0]!r}; there are {', '.join(PARTS)}, joined by +")
    whole = Setting()
    for part in (PARTS[part] for part in name.split("+")):
        whole = Setting(
            whole.engine | part.engine,
            whole.compilation | part.compilation,
            whole.sampling | part.sampling,
            whole.environment | part.environment,
        )
    return whole


def main(path: str) -> None:
    """Do the job that a file describes."""
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    setting = named(job["setting"])
    os.environ.update(setting.environment)  # before vLLM is imported, which reads them
    JOBS[job["job"]](job, setting, Report(job["report"]))


def _engine(model: str, random_weights: bool, dtype: str, setting: Setting, **more: Any) -> Any:
    import vllm

    settings: dict[str, Any] = {"model": model, "dtype": dtype, "seed": 0} | more | setting.engine
    if random_weights:
        settings |= {"load_format": "dummy", "skip_tokenizer_init": True}
    if setting.compilation:
        settings["compilation_config"] = setting.compilation
    return vllm.LLM(**settings)


def _sample(llm: Any, work: Work, setting: Setting) -> list[Any]:
    """All responses. No seed for each request: vLLM then draws for all rows at once, which is faster."""
    import vllm

    common: dict[str, Any] = {"n": work.samples, "temperature": work.temperature, "logprobs": 0}
    common |= {"stop_token_ids": work.stop_ids} if work.stop_ids else {"ignore_eos": True}
    if work.random:
        common["detokenize"] = False  # there is no tokenizer
    params = [vllm.SamplingParams(**(common | setting.sampling), max_tokens=limit) for limit in work.limits]
    return list(llm.generate([{"prompt_token_ids": ids} for ids in work.prompts], params, use_tqdm=False))


def rollout(job: dict[str, Any], setting: Setting, report: Report) -> None:
    """The work, ``repeats`` times, after a short rollout."""
    work = Work(**job["work"])
    llm = _engine(work.model, work.random, work.dtype, setting)
    _sample(llm, work.warmup(), setting)
    report.say("ready")
    for _ in range(job["repeats"]):
        start = time.perf_counter()
        outputs = _sample(llm, work, setting)
        seconds = time.perf_counter() - start
        lengths = [
            (len(prompt), len(response.token_ids))
            for prompt, output in zip(work.prompts, outputs, strict=True)
            for response in output.outputs
        ]
        report.say("rollout", seconds=seconds, lengths=lengths)
        llm.reset_prefix_cache()


def steady(job: dict[str, Any], setting: Setting, report: Report) -> None:
    """Decode steps with all rows at one context, one engine for the most rows and the longest context."""
    rows, context = (max(values) for values in zip(*job["cells"], strict=True))
    sized = replace(setting, engine={"max_num_seqs": rows} | setting.engine)
    longest = context + job["lead"] + job["steps"]
    llm = _engine(job["model"], True, job["dtype"], sized, max_model_len=longest, enable_prefix_caching=False)
    report.say("ready")
    vocabulary = Shape.read(job["model"]).vocabulary
    for rows, context in job["cells"]:
        report.say("cell", rows=rows, context=context, **_steady_cell(llm, setting, vocabulary, rows, context, job))


def _steady_cell(
    llm: Any, setting: Setting, vocabulary: int, rows: int, context: int, job: dict[str, Any]
) -> dict[str, Any]:
    short, long = steady_works(job, vocabulary, rows, context)
    seconds: dict[str, list[float]] = {"short": [], "long": []}
    for _ in range(job["repeats"]):
        for name, work in (("short", short), ("long", long)):
            start = time.perf_counter()
            _sample(llm, work, setting)
            seconds[name].append(time.perf_counter() - start)
    return steady_result(seconds, rows, job["steps"])


def startup(job: dict[str, Any], setting: Setting, report: Report) -> None:
    """From nothing to a ready engine, and to its first token."""
    work = Work(**job["work"])
    llm = _engine(work.model, work.random, work.dtype, setting)
    report.say("ready")
    _sample(llm, replace(work, prompts=work.prompts[:1], limits=[1], samples=1), setting)
    report.say("first token")
    _sample(llm, work.warmup(), setting)
    report.say("first batch")


JOBS: dict[str, Callable[[dict[str, Any], Setting, Report], None]] = {
    "rollout": rollout,
    "steady": steady,
    "startup": startup,
}

if __name__ == "__main__":
    main(sys.argv[1])
