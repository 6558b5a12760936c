"""What other programs find in a folder with a model that was written here: older names, type, stop ids, code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dapo.model.export import export_dtype, export_model, older_keys, rounded_back
from dapo.model.loading import load_model
from helpers import ARCHITECTURES, random_model

ROPE = {"rope_type": "default", "rope_theta": 100.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "factor": 2.0}
ROOT = Path(__file__).parents[2]


def written(folder: Path, file: str = "config.json") -> dict[str, Any]:
    return dict(json.loads((folder / file).read_text(encoding="utf-8")))


def source(folder: Path, name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    random_model(name, **changes).to(dtype).save_pretrained(folder)
    return folder


def export(folder: Path, to: Path, **how: Any) -> Path:
    to.mkdir()
    export_model(load_model(folder), to, **how)
    return to


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_architecture_is_written_for_older_readers_too(name: str, tmp_path: Path) -> None:
    rotary = {} if name == "gpt2" else {"rope_parameters": ROPE}
    if name == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": 50.0}
        rotary = {"rope_parameters": {"full_attention": LINEAR | {"rope_theta": 300.0}, "sliding_attention": local}}
    found = written(export(source(tmp_path / "from", name, **rotary), tmp_path / "to"))
    assert found["torch_dtype"] == found["dtype"] == "float32"
    assert found["model_type"] == ARCHITECTURES[name]["model_type"]
    assert found["architectures"] == written(tmp_path / "from")["architectures"]
    assert written(tmp_path / "from").items() <= found.items(), "nothing is lost or another value"
    if name == "gpt2":
        assert "rope_theta" not in found and found["n_positions"] == 256
    elif name == "gemma3_text":
        assert (found["rope_theta"], found["rope_local_base_freq"]) == (300.0, 50.0)
        assert found["rope_scaling"] == {"rope_type": "linear", "type": "linear", "factor": 2.0}
    else:
        assert (found["rope_theta"], found["rope_scaling"]) == (100.0, None)


@pytest.mark.parametrize("scaling", [YARN, LLAMA3, LINEAR])
def test_scaled_positions_are_written_under_their_older_name_too(scaling: dict[str, Any]) -> None:
    old = older_keys({"dtype": "bfloat16", "rope_parameters": {"rope_theta": 5e5, **scaling}})
    assert old == {
        "torch_dtype": "bfloat16",
        "rope_theta": 5e5,
        "rope_scaling": scaling | {"type": scaling["rope_type"]},
    }


def test_a_folder_of_transformers_4_keeps_its_keys(tmp_path: Path) -> None:
    folder = source(tmp_path / "from", "llama")
    older = written(folder)
    older.pop("rope_parameters"), older.pop("dtype")
    older |= {"rope_theta": 5e5, "rope_scaling": LLAMA3, "torch_dtype": "bfloat16", "pretraining_tp": 1, "note": [1]}
    (folder / "config.json").write_text(json.dumps(older), encoding="utf-8")
    found = written(export(folder, tmp_path / "to", dtype=torch.bfloat16))
    assert found["rope_parameters"] == LLAMA3 | {"rope_theta": 5e5}
    assert found["rope_scaling"] == LLAMA3 | {"type": "llama3"}
    assert (found["rope_theta"], found["torch_dtype"], found["dtype"]) == (5e5, "bfloat16", "bfloat16")
    assert (found["pretraining_tp"], found["note"]) == (1, [1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stated", [True, False])
def test_weights_are_written_in_the_type_of_the_source(dtype: torch.dtype, stated: bool, tmp_path: Path) -> None:
    folder = source(tmp_path / "from", "qwen2", dtype)
    if not stated:
        config = written(folder)
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "dtype"}))
    model = load_model(folder)
    assert model.dtype == torch.float32 and export_dtype(model, "source") == dtype
    (tmp_path / "to").mkdir()
    export_model(model, tmp_path / "to", export_dtype(model, "source"))
    assert written(tmp_path / "to")["dtype"] == written(tmp_path / "to")["torch_dtype"] == str(dtype)[6:]
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("from", "to"))
    assert before.keys() == after.keys(), "a tied head is written once"
    assert all(after[name].dtype == dtype and torch.equal(after[name], tensor) for name, tensor in before.items())


def test_what_a_type_cannot_hold_is_written_in_float32(tmp_path: Path) -> None:
    model = load_model(random_model("llama"))
    for name in ("exact", "rounded", "large"):
        (tmp_path / name).mkdir()
    export_model(model, tmp_path / "exact", torch.bfloat16, exact=True)  # random numbers have more digits
    export_model(model, tmp_path / "rounded", torch.bfloat16)
    with torch.no_grad():
        next(model.parameters())[0, 0] = 1e6  # more than 65,504
    export_model(model, tmp_path / "large", export_dtype(model, "float16"))
    types = {name: written(tmp_path / name)["dtype"] for name in ("exact", "rounded", "large")}
    assert types == {"exact": "float32", "rounded": "bfloat16", "large": "float32"}


def test_steps_that_a_type_cannot_tell_are_counted(tmp_path: Path) -> None:
    """Between 1 and 2 bfloat16 has a number every 1/128: of +0.001 and +0.01 the first is lost. What did not change
    does not count."""
    model = random_model("qwen2")
    weights = model.model.layers[0].mlp.up_proj.weight.data
    weights.fill_(1.0)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    parameters = dict(model.named_parameters())
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert rounded_back(parameters, tmp_path, torch.bfloat16) == (0, 0)
    weights[0, :3] += 0.001
    weights[1, :1] += 0.01
    assert rounded_back(parameters, tmp_path, torch.bfloat16) == (3, 4)
    assert rounded_back(parameters, tmp_path, torch.float32) == (0, 4)


def test_a_head_of_its_own_is_said_to_be_one(tmp_path: Path) -> None:
    """Against the source's config, which says tied: others go by the config, and would drop the trained head."""
    random_model("qwen2", tie_word_embeddings=False).save_pretrained(tmp_path / "source")
    file = tmp_path / "source/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    model = load_model(tmp_path / "source")
    (tmp_path / "export").mkdir()
    export_model(model, tmp_path / "export")
    written = json.loads((tmp_path / "export/config.json").read_text())
    assert written["tie_word_embeddings"] is False
    assert "lm_head.weight" in load_file(tmp_path / "export/model.safetensors")


def test_settings_for_generation_are_those_of_the_source_with_what_ended_responses(tmp_path: Path) -> None:
    folder = source(tmp_path / "from", "qwen2")
    settings = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 5], "of_an_engine": "kept"}  # no do_sample
    (folder / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    found = written(export(folder, tmp_path / "to", stop_ids=(1, 5, 7)), "generation_config.json")
    assert settings | {"eos_token_id": [1, 5, 7]} == {key: found[key] for key in settings}
    assert load_model(tmp_path / "to").generation_config.eos_token_id == [1, 5, 7]


def test_code_that_comes_with_a_model_goes_with_it(tmp_path: Path) -> None:
    folder = source(tmp_path / "from", "llama")
    (folder / "modeling_own.py").write_text("x = 1\n")
    assert not (export(folder, tmp_path / "without") / "modeling_own.py").exists()
    config = written(folder) | {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert (export(folder, tmp_path / "to") / "modeling_own.py").read_text() == "x = 1\n"
    assert written(tmp_path / "to")["auto_map"] == config["auto_map"]


GREEDY = """
import sys
sys.modules["datasets"] = None  # made for another version of the hub's client
import json, torch, transformers
from transformers import AutoModelForCausalLM
answers = {"version": transformers.__version__}
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
    prompt = torch.arange(2, 42)[None]
    out = model.generate(prompt, attention_mask=prompt * 0 + 1, max_new_tokens=24, do_sample=False, eos_token_id=-1)
    answers[folder] = [out[0].tolist(), round(float(model(prompt).logits.abs().double().sum().detach()), 1)]
print(json.dumps(answers))
"""


@pytest.mark.nightly
def test_greedy_answers_are_the_same_with_transformers_4_and_5(tmp_path: Path) -> None:
    older = ROOT / ".venv-transformers4"
    if not (older / "transformers").is_dir():
        pytest.skip("make transformers4 makes .venv-transformers4")
    made: dict[str, Any] = {name: {"rope_parameters": ROPE} for name in ARCHITECTURES} | {"gpt2": {}}
    scaled = {"yarn": ("qwen2", YARN), "llama3": ("llama", LLAMA3), "linear": ("mistral", LINEAR)}
    local = {"rope_type": "default", "rope_theta": 50.0}
    made["gemma3_text"] = {
        "rope_parameters": {"full_attention": LINEAR | {"rope_theta": 300.0}, "sliding_attention": local}
    }
    folders = [export(source(tmp_path / f"{n}-from", n, **how), tmp_path / n) for n, how in made.items()]
    for name, (kind, rope) in scaled.items():
        folder = source(tmp_path / f"{name}-from", kind, rope_parameters=ROPE | rope)
        folders.append(export(folder, tmp_path / name))
    said = []
    for path in ({}, {"PYTHONPATH": str(older)}):
        command = [sys.executable, "-c", GREEDY, *map(str, folders)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=_environment(path))
        assert done.returncode == 0, done.stderr[-2000:]
        said.append(json.loads(done.stdout.splitlines()[-1]))
    versions = [answers.pop("version") for answers in said]
    assert versions[0].startswith("5.") and versions[1].startswith("4.57")
    assert said[0] == said[1]


def _environment(more: dict[str, str]) -> dict[str, str]:
    import os

    return {**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, "HF_HUB_OFFLINE": "1", **more}
