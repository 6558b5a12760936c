"""LoRA adapters, unmerged, against PEFT's own model and against the adapter merged into its base."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dapo.errors import ModelError
from dapo.model.adapters import CONFIG_FILE, WEIGHTS_FILE, has_adapter
from dapo.model.forward import hidden_states, output_head
from dapo.model.loading import copy_model, load_model, load_tokenizer
from dapo.model.packed import PackedAttention
from dapo.rollout.engine import Request, Sampling
from dapo.rollout.native.slots import slot_decoder
from helpers import VOCAB, random_model

peft = pytest.importorskip("peft")

IDS = torch.randint(2, VOCAB, (40,), generator=torch.Generator().manual_seed(3))
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("qwen2", {"target_modules": ALL}),
    "lora, untied": ("llama", {"target_modules": ALL}),
    "all-linear": ("llama", {"target_modules": "all-linear"}),
    "two layers, by pattern": (
        "qwen3",
        {"target_modules": ALL, "layers_to_transform": [0, 2], "exclude_modules": ["up_proj"]},
    ),
    "ranks and alphas by pattern": (
        "mistral",
        {"target_modules": ALL, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 40}},
    ),
    "rank-stabilized": ("gemma2", {"target_modules": ALL, "use_rslora": True}),
    "dora": ("gemma3_text", {"target_modules": ALL, "use_dora": True}),
    "with biases of its own": ("qwen2", {"target_modules": ["q_proj", "v_proj"], "lora_bias": True}),
    "on the feed-forward layers": ("gemma", {"target_modules": ["gate_proj", "up_proj", "down_proj"]}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "conv1d, dora": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
}


def make_adapter(folder: Path, name: str = "qwen2", base: str | None = None, **settings: Any) -> Any:
    """A base in ``folder/base`` and a random adapter in ``folder/adapter``; returns PEFT's model, its own attention."""
    model = random_model(name)
    model.save_pretrained(folder / "base")
    settings = {"target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.5} | settings
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **settings)).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter_name, parameter in wrapped.named_parameters():
            if "lora_" in parameter_name:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    wrapped.peft_config["default"].base_model_name_or_path = base or str(folder / "base")
    wrapped.save_pretrained(folder / "adapter")
    return wrapped


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / CONFIG_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def logits_of(model: Any) -> torch.Tensor:
    """Of our two halves, over one packed row."""
    with torch.no_grad():
        hidden = hidden_states(model, IDS, torch.arange(len(IDS)), PackedAttention([len(IDS)]))
        return output_head(model).logits(hidden)


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_gives_what_peft_gives(name: str, tmp_path: Path) -> None:
    architecture, settings = ADAPTERS[name]
    theirs = make_adapter(tmp_path, architecture, **settings)
    ours = load_model(tmp_path / "adapter")
    assert has_adapter(ours) and any(".lora_A." in n for n, _ in ours.named_parameters())  # not merged
    with torch.no_grad():
        expected = theirs(IDS[None]).logits[0]
        merged = copy.deepcopy(theirs).merge_and_unload()(IDS[None]).logits[0]
    got = logits_of(ours)
    assert float((got - expected).abs().max()) < 1e-4
    assert float((got - merged).abs().max()) < 1e-4 * max(1.0, float(merged.abs().max()))
    base = load_model(tmp_path / "base")
    assert not has_adapter(base)
    assert float((got - logits_of(base)).abs().max()) > 0.1


def test_the_decoder_decodes_with_the_adapter_as_generate_does(tmp_path: Path) -> None:
    theirs = make_adapter(tmp_path, target_modules=ALL)
    prompts = [tuple(IDS[:n].tolist()) for n in (1, 5, 19)]
    decoded = []
    for folder in ("adapter", "base"):
        model = copy_model(load_model(tmp_path / folder), torch.float32)
        decoder = slot_decoder(model, (1,), max_sequence_tokens=48, max_concurrent_samples=3)
        for i, prompt in enumerate(prompts):
            decoder.submit(0, Request(i, prompt, (0,), Sampling(0.0, 20)))
        samples = []
        while decoder.busy:
            samples += [s for _, s in decoder.step()]
        decoded.append({s.request_id: s for s in samples})
    with_adapter, without = decoded
    for i, prompt in enumerate(prompts):
        out = theirs.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=20,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = with_adapter[i].token_ids.tolist()
        assert tokens == out.sequences[0, len(prompt) :].tolist()
        logprobs = [float(step[0].log_softmax(-1)[t]) for step, t in zip(out.logits, tokens, strict=True)]
        assert with_adapter[i].logprobs.tolist() == pytest.approx(logprobs, abs=1e-4)
    assert any(with_adapter[i].token_ids.tolist() != without[i].token_ids.tolist() for i in with_adapter)


def test_a_copy_carries_the_adapter_and_is_its_own(tmp_path: Path) -> None:
    make_adapter(tmp_path)
    model = load_model(tmp_path / "adapter")
    before = logits_of(model)
    twin = copy_model(model, torch.float32)
    assert has_adapter(twin) and torch.equal(logits_of(twin), before)
    narrow = copy_model(model, torch.bfloat16)
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16}
    assert float((logits_of(narrow) - before).abs().mean()) < 0.05 * float(before.abs().mean())
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "lora_B" in n).zero_()
    assert not torch.equal(logits_of(model), before)
    assert torch.equal(logits_of(twin), before)


def test_the_parameters_have_the_type_that_was_asked_for(tmp_path: Path) -> None:
    make_adapter(tmp_path)
    model = load_model(tmp_path / "adapter", torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for n, b in model.named_buffers() if "inv_freq" in n} == {torch.float32}


def test_the_base_may_be_named_from_the_adapters_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_adapter(tmp_path, base="../base")
    assert has_adapter(load_model(tmp_path / "adapter"))
    change_config(tmp_path / "adapter", base_model_name_or_path="base")  # as PEFT writes it: from where it ran
    monkeypatch.chdir(tmp_path)
    assert has_adapter(load_model(tmp_path / "adapter"))


def test_the_tokenizer_is_that_of_the_base_where_the_adapter_has_none(tmp_path: Path) -> None:
    from dapo.commands.demo.task import make_tokenizer

    make_adapter(tmp_path)
    with pytest.raises(ModelError, match="tokenizer"):
        load_tokenizer(str(tmp_path / "adapter"))
    make_tokenizer().save_pretrained(tmp_path / "base")
    of_base = load_tokenizer(str(tmp_path / "base")).get_vocab()
    assert load_tokenizer(str(tmp_path / "adapter")).get_vocab() == of_base


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"target_modules": ["lm_head", "q_proj"]}, "changes the output head"),
        ({"target_modules": ["embed_tokens"]}, "changes the embedding"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not served"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices is not served"),
        ({"bias": "lora_only"}, "bias 'lora_only' is not served"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens is not served"),
    ],
)
def test_what_an_adapter_asks_beyond_linear_layers_is_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_adapter(tmp_path, "llama", **settings)
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path / "adapter")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"peft_type": "IA3"}, "peft_type IA3 is not served; served are LoRA"),
        ({"peft_type": "PROMPT_TUNING"}, "PROMPT_TUNING is not served"),
        ({"task_type": "SEQ_CLS"}, "is of a reward model"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4' changes the weights of the base"),
        ({"revision": "v2"}, "it is for revision v2 of its base"),
        ({"of_a_later_release": True}, "of_a_later_release is not served"),
        ({"base_model_name_or_path": None}, "names no model in base_model_name_or_path"),
        ({"base_model_name_or_path": "."}, "its base . is a folder with an adapter, too"),
        (
            {"base_model_name_or_path": "./nowhere"},
            r"adapter .*: its base ./nowhere is no folder here.* base_model_name_or_path of adapter_config.json",
        ),
        ({"target_modules": ["not_a_layer"]}, "does not fit"),
        ({"r": 3}, "does not fit .*base: .*"),
        ({"target_modules": ["q_proj"]}, "6 unexpected weights, such as .*down_proj.lora_A"),
        ({"target_modules": ["q_proj", "down_proj", "o_proj"]}, "6 missing weights, such as .*o_proj.lora_A"),
    ],
)
def test_a_config_that_asks_for_something_else_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_adapter(tmp_path)
    change_config(tmp_path / "adapter", **changes)
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path / "adapter")


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    make_adapter(tmp_path)
    weights = tmp_path / "adapter" / WEIGHTS_FILE
    state = load_file(weights)
    save_file({name: torch.full_like(t, float("nan")) for name, t in state.items()}, weights)
    with pytest.raises(ModelError, match=r"the weights .*lora_A.* hold NaN"):
        load_model(tmp_path / "adapter")
    weights.write_bytes(b"no tensors")
    with pytest.raises(ModelError, match=f"{WEIGHTS_FILE} cannot be read"):
        load_model(tmp_path / "adapter")
    weights.unlink()
    with pytest.raises(ModelError, match=f"there is no {WEIGHTS_FILE}"):
        load_model(tmp_path / "adapter")
    (tmp_path / "adapter" / CONFIG_FILE).write_text("{")
    with pytest.raises(ModelError, match=f"{CONFIG_FILE} cannot be read"):
        load_model(tmp_path / "adapter")


def test_without_peft_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_adapter(tmp_path)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match=r"pip install 'dapo-rl\[lora\]'"):
        load_model(tmp_path / "adapter")


def test_a_peft_model_is_taken_by_what_it_wraps(tmp_path: Path) -> None:
    wrapped = make_adapter(tmp_path)
    with torch.no_grad():
        expected = wrapped(IDS[None]).logits[0]
    with pytest.raises(ModelError, match="a PeftModel wraps the model"):
        load_model(wrapped)
    inside = load_model(wrapped.base_model.model)
    assert has_adapter(inside) and float((logits_of(inside) - expected).abs().max()) < 1e-4


def test_an_adapter_that_transformers_found_on_the_hub_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It puts one on by itself, of any kind, where the repository of a model holds one."""
    from transformers import AutoModelForCausalLM

    inside = make_adapter(tmp_path).base_model.model
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda path, **_: (inside, {}))
    with pytest.raises(ModelError, match="is an adapter on the hub; download it"):
        load_model(tmp_path / "base")
