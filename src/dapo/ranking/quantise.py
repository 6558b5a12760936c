"""Policies and reward models with weights of 8 or 4 bits, as Transformers and vLLM load them, and what that costs.

On a CPU by torchao (8 bits), on a GPU by torchao or bitsandbytes; head and embedding keep their type.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dapo.errors import ConfigError, DataError, extra
from dapo.inference.found_model import find_model
from dapo.model.adapters import CONFIG_FILE
from dapo.model.loading import load_tokenizer, read_config
from dapo.ranking.score import is_reward_model
from dapo.util.files import new_folder

KINDS = ("int8", "int4", "nf4")
"""torchao weight-only, of 8 and 4 bits, and bitsandbytes' NormalFloat of 4 bits; the last two on a GPU."""
_KEPT = ["lm_head", "score"]


def quantise(model: str, out: Path, kind: str, texts: Sequence[str]) -> dict[str, Any]:
    """Write the quantised model to ``out`` and compare it with the original on ``texts``: bytes of weights, how many
    linear layers of how many became small, seconds for a text, and how far logits (of a reward model: scores) move; of
    a policy how often the likeliest token stays.
    Raises UserError: the kind needs a GPU or a package, or the folder is taken."""
    import transformers

    on_gpu = torch.cuda.is_available()
    if kind not in (works := KINDS if on_gpu else KINDS[:1]):
        raise ConfigError(f"--kind {kind}: not on a {'GPU' if on_gpu else 'CPU'}; what works here: {', '.join(works)}")
    if not any(texts):
        raise DataError("--data: holds no text to compare on")
    found = find_model(model)
    ranks = is_reward_model(found.path)
    kind_of = "SequenceClassification" if ranks else "CausalLM"
    if (Path(found.path) / CONFIG_FILE).is_file():
        base = f"AutoModelFor{kind_of}.from_pretrained(BASE{', num_labels=1' * ranks})"
        merged = f"PeftModel.from_pretrained({base}, FOLDER).merge_and_unload() (docs/models.md)"
        raise ConfigError(f"{found.path}: is an adapter; merge it into its base first, by peft: {merged}")
    loader = getattr(transformers, f"AutoModelFor{kind_of}")
    how: dict[str, Any] = {"dtype": torch.float32, "device_map": None}
    if on_gpu:
        how = {"dtype": torch.bfloat16, "device_map": "cuda"}
    tokenizer = load_tokenizer(found.path)
    if hasattr(read_config(found.path), "quantization_config"):
        raise ConfigError(f"{found.path}: is quantised already; name the model that it was made from")
    with new_folder(out) as folder:
        with extra("quantise", "dapo quantise"):  # before minutes of work
            config = _config(kind)
        before, seconds, size = _run(loader.from_pretrained(found.path, **how), tokenizer, texts)
        with extra("quantise", "dapo quantise"):
            small = loader.from_pretrained(found.path, quantization_config=config, **how)
        small.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        loaded = loader.from_pretrained(folder, **how)
        after, seconds_after, size_after = _run(loaded, tokenizer, texts)
    moved = torch.cat([(a - b).abs().flatten() for a, b in zip(after, before, strict=True)])
    told: dict[str, Any] = {"mib": [size / 2**20, size_after / 2**20], "seconds": [seconds, seconds_after]}
    told["layers"] = small_layers(loaded)
    told |= {"mean_change": float(moved.mean()), "spread": float(torch.cat([b.flatten() for b in before]).std())}
    if not ranks:
        same = torch.cat([(a.argmax(-1) == b.argmax(-1)).flatten() for a, b in zip(after, before, strict=True)])
        told["same_token"] = float(same.float().mean())
    return told


def _config(kind: str) -> Any:
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if kind == "nf4":
        compute = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
        return BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=_KEPT, **compute)
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig

    four = {"group_size": 128, "int4_packing_format": "tile_packed_to_4d"}  # the default format needs mslk
    weights = Int8WeightOnlyConfig() if kind == "int8" else Int4WeightOnlyConfig(**four)
    return TorchAoConfig(quant_type=weights, modules_to_not_convert=_KEPT)


@torch.inference_mode()
def _run(model: Any, tokenizer: Any, texts: Sequence[str]) -> tuple[list[torch.Tensor], float, int]:
    """Logits of each text, seconds for one (the median), and bytes of the weights."""
    model.eval()
    found, seconds = [], []
    for text in [texts[0], *texts]:  # the first one warms up
        batch = tokenizer(text, return_tensors="pt").to(model.device)
        start = time.perf_counter()
        logits = model(**batch).logits
        if logits.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)  # without what it takes to copy them
        found.append(logits.float().cpu())
    size = sum(_bytes(weights) for weights in {id(p): p for p in model.parameters()}.values())
    return found[1:], sorted(seconds[1:])[len(texts) // 2], size


def small_layers(model: Any) -> tuple[int, int]:
    """Linear layers whose numbers take less than two bytes each, and all of them: what fits into no groups stays."""
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    return sum(_bytes(one.weight) < 2 * one.in_features * one.out_features for one in layers), len(layers)


def _bytes(weights: torch.Tensor) -> int:
    parts = getattr(weights, "tensor_data_names", None)  # torchao's tensors hold others
    each = [getattr(weights, name) for name in parts] if parts else [weights]
    return sum(part.numel() * part.element_size() for part in each)
