"""vLLM's side of ``bench/rollout.py``. Needs nothing of dapo."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from peers import named
from runner import Report
from work import Rollout, warmups

PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "defaults": {},
    "async": {"engine": {"async_scheduling": True}},
    "sync": {"engine": {"async_scheduling": False}},
    **{f"graphs{n}": {"compilation": {"max_cudagraph_capture_size": n}} for n in (1024, 2048)},
    "full": {"compilation": {"cudagraph_mode": "FULL"}},
    "fulldecode": {"compilation": {"cudagraph_mode": "FULL_DECODE_ONLY"}},
    "piecewise": {"compilation": {"cudagraph_mode": "PIECEWISE"}},
    **{f"seqs{n}": {"engine": {"max_num_seqs": n}} for n in (256, 512, 1024, 2048)},
    "nodetok": {"sampling": {"detokenize": False}},
    "flat": {"sampling": {"flat_logprobs": True}},  # log-probs in arrays, not one object a token
    **{f"mem{n}": {"engine": {"gpu_memory_utilization": n / 100}} for n in (80, 95)},
    "throughput": {"engine": {"performance_mode": "throughput"}},
    "inprocess": {"environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}},
    "runner1": {"environment": {"VLLM_USE_V2_MODEL_RUNNER": "0"}},
    "runner2": {"environment": {"VLLM_USE_V2_MODEL_RUNNER": "1"}},
}
"""Arguments of ``LLM`` (engine), of its ``compilation_config``, of ``SamplingParams``, and environment variables."""


def rollout(job: dict[str, Any], report: Report) -> None:
    """Rollouts with one engine, ``repeats`` times, after a short one of each."""
    setting = named(PARTS, job["setting"])
    os.environ.update(setting["environment"])  # before vLLM is imported, which reads them
    import vllm

    report.say("imported")
    works = [Rollout(**work) for work in job["works"]]
    first = works[0]
    settings = {"model": first.model, "dtype": first.dtype, "seed": 0} | job["engine"] | setting["engine"]
    if first.device == "cpu":  # of whose memory others have a part
        settings = {"gpu_memory_utilization": 0.3} | settings
    if first.random:
        settings |= {"load_format": "dummy", "skip_tokenizer_init": True}
    if setting["compilation"]:
        settings["compilation_config"] = setting["compilation"]
    llm = vllm.LLM(**settings)
    report.say("ready")
    _sample(llm, first.first_token(), setting)
    report.say("first token")
    for work in warmups(works):
        _sample(llm, work, setting)
    report.say("first batch")
    for _ in range(job["repeats"]):
        for number, work in enumerate(works):
            start = time.perf_counter()
            outputs = _sample(llm, work, setting)
            seconds = time.perf_counter() - start
            pairs = [(prompt, r) for prompt, out in zip(work.prompts, outputs, strict=True) for r in out.outputs]
            lengths = [(len(prompt), len(r.token_ids)) for prompt, r in pairs]
            report.say("rollout", work=number, seconds=seconds, lengths=lengths)
            llm.reset_prefix_cache()


def _sample(llm: Any, work: Rollout, setting: Mapping[str, dict[str, Any]]) -> list[Any]:
    """All responses. No seed for each request: vLLM then draws for all rows at once, which is faster."""
    import vllm

    common: dict[str, Any] = {"n": work.samples, "temperature": work.temperature, "logprobs": 0}
    common |= {"stop_token_ids": work.stop_ids} if work.stop_ids else {"ignore_eos": True}
    if work.random:
        common["detokenize"] = False  # there is no tokenizer
    params = [vllm.SamplingParams(**(common | setting["sampling"]), max_tokens=limit) for limit in work.limits]
    return list(llm.generate([{"prompt_token_ids": ids} for ids in work.prompts], params, use_tqdm=False))
