"""The model that a run leaves behind is loaded by vLLM as by any other program: tokens, ends, template, rope, type."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dapo.config import DataConfig
from dapo.data.template import PromptTemplate
from dapo.model.loading import load_model, load_tokenizer, stop_token_ids
from dapo.rollout.engine import Request, Sampling
from dapo.rollout.native.engine import NativeEngine
from run_cases import TOKENIZER, run, tiny_model

pytestmark = pytest.mark.vllm
SHAPE = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
}  # as vLLM's kernels
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 32,
}
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}="
LONGEST, LIMIT = 96, 48
STOPS = [4, 7, 10, 13, 16]


def ours(folder: Path, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    async def collect() -> list[list[int]]:
        model = load_model(str(folder), torch.float32)
        stop_ids = stop_token_ids(model, load_tokenizer(str(folder)))
        engine = NativeEngine(model, stop_ids, max_sequence_tokens=LONGEST, max_concurrent_samples=8)
        requests = [Request(n, prompt, (1,), Sampling(0.0, LIMIT)) for n, prompt in enumerate(prompts)]
        found = {s.request_id: s.token_ids.tolist() async for s in engine.generate(requests)}
        await engine.close()
        return [found[n] for n in range(len(prompts))]

    return asyncio.run(collect())


def merged(adapter: Path, to: Path) -> Path:
    """As docs/models.md has it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    base = AutoModelForCausalLM.from_pretrained(adapter.parents[1] / "base")
    PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(to)
    AutoTokenizer.from_pretrained(adapter).save_pretrained(to)
    GenerationConfig.from_pretrained(adapter).save_pretrained(to)
    return to


def trained(root: Path, name: str) -> Path:
    """The folder that a run of a step leaves behind."""
    changes: dict[str, Any] = {"training.learning_rate": 1e-2, "rollout.stop_token_ids": STOPS}
    architecture, more = (
        ("llama", {"rope_parameters": LLAMA3}) if name == "llama" else ("qwen2", {"tie_word_embeddings": False})
    )
    model = tiny_model(name=architecture, **SHAPE, **more)
    tokenizer = type(TOKENIZER)(tokenizer_object=TOKENIZER.backend_tokenizer, **TOKENIZER.special_tokens_map)
    tokenizer.chat_template = CHAT
    if name != "lora":
        run(root / "run", changes, model=model, tokenizer=tokenizer)
        return root / "run" / "model-after"
    model.save_pretrained(root / "base")
    tokenizer.save_pretrained(root / "base")
    run(root / "run", changes | {"model.path": str(root / "base"), "model.lora.rank": 4}, model=None, tokenizer=None)
    return merged(root / "run" / "model-after", root / "merged")


@pytest.mark.parametrize("name", ["qwen2", pytest.param("llama", marks=pytest.mark.nightly), "lora"])
def test_the_model_of_a_run_loads_in_vllm(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process, which is faster
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    folder = trained(tmp_path, name)
    llm = LLM(str(folder), dtype="float32", enforce_eager=True, max_model_len=LONGEST)  # auto would narrow float32
    config = llm.llm_engine.model_config
    assert config.hf_config.dtype == torch.float32
    rope = {"rope_type": "default"} if name != "llama" else LLAMA3
    assert config.hf_config.rope_parameters.items() >= rope.items()
    template = PromptTemplate(DataConfig(template="chat"), load_tokenizer(str(folder)))
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(2, len(TOKENIZER), size).tolist()) for size in range(4, LONGEST - LIMIT, 2)]
    greedy = SamplingParams(temperature=0.0, max_tokens=LIMIT, repetition_penalty=1.0)
    found = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], greedy, use_tqdm=False)
    assert [list(one.outputs[0].token_ids) for one in found] == ours(folder, prompts)
    ends = {one.outputs[0].token_ids[-1] for one in found if one.outputs[0].finish_reason == "stop"}
    assert ends & set(STOPS)
    [chat] = llm.chat([{"role": "user", "content": "1+2"}], greedy, use_tqdm=False)
    said = template.apply([{"role": "user", "content": "1+2"}], tokenize=True, add_generation_prompt=True)
    assert chat.prompt_token_ids == list(said)
    llm.llm_engine.engine_core.shutdown()
