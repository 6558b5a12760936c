"""A recipe without a mistake, of a tiny model and data that lie beside it, and mistakes to plant in a copy of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

from dapo.commands.demo.task import make_tokenizer
from helpers import random_model

RECIPE: dict[str, Any] = {
    "model": {"path": "model"},
    "data": {"train": "train.jsonl", "template": "plain", "max_prompt_length": 16},
    "rollout": {
        "prompts_per_step": 8,
        "samples_per_prompt": 4,
        "max_response_length": 20,
        "max_concurrent_samples": 32,
    },
    "reward": {"kind": "exact", "after": "#"},
    "algorithm": {"overlong_buffer": {"len": 4}},
    "training": {"steps": 10, "groups_per_update": 4, "warmup_steps": 2, "tokens_per_micro_batch": 256},
    "evaluation": {"data": "heldout.jsonl", "every": 5},
}


def rows(first: int, last: int) -> list[dict[str, Any]]:
    """Additions, none of them twice."""
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(first, last) for b in range(10)]


def make_good(folder: Path) -> None:
    """Recipe, data, model and tokenizer."""
    tokenizer = make_tokenizer()
    random_model("qwen2", vocab_size=len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_rows(folder, rows(0, 6))
    write_rows(folder, rows(6, 8), "heldout.jsonl")
    write_recipe(folder, {})


def write_rows(folder: Path, lines: Sequence[dict[str, Any]], name: str = "train.jsonl") -> None:
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def write_recipe(folder: Path, changes: dict[str, Any]) -> None:
    """``changes``: by dotted key; a value for a whole section replaces it."""
    tree = json.loads(json.dumps(RECIPE))
    for key, value in changes.items():
        *sections, last = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")


def edit_json(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None takes one out."""
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    found = {key: value for key, value in {**found, **changes}.items() if value is not None}
    file.write_text(json.dumps(found), encoding="utf-8")


# --- mistakes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mistake:
    """``plant`` makes it in a copy of the good folder. ``name`` and ``status``: of the finding that must tell of it,
    with ``says`` in its text or its advice."""

    name: str
    status: str
    plant: Callable[[Path], object]
    says: str
    options: tuple[str, ...] = ()
    also: frozenset[str] = frozenset()
    """What else is wrong then."""


def _recipe(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: write_recipe(folder, {key.replace("__", "."): value for key, value in changes.items()})


def _rows(make: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Callable[[Path], object]:
    return lambda folder: write_rows(folder, make(rows(0, 6)))


def _with_solution(row: dict[str, Any], shown: bool = False) -> dict[str, Any]:
    solution = f"{row['prompt']}{'1+' * 8}0={row['answer']}"
    return {**row, "solution": solution, "prompt": solution + row["prompt"] if shown else row["prompt"]}


def _answered(row: dict[str, Any]) -> list[dict[str, str]]:
    return [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": "1;2"}]


def _function(body: str) -> Callable[[Path], object]:
    def plant(folder: Path) -> None:
        (folder / "checker.py").write_text(f"def score(response, answer):\n    return {body}\n", encoding="utf-8")
        write_recipe(folder, {"reward": {"kind": "function", "function": "checker.py:score", "workers": 1}})

    return plant


def _cut_line(folder: Path) -> None:
    with (folder / "train.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"prompt": "2+2=", "ans')


def _weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def plant(folder: Path) -> None:
        file = folder / "model/model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})

    return plant


def _other_end(folder: Path) -> None:
    """A chat template that ends turns with a token which nobody calls an end."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["#"]})
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}#{% endfor %}"
    tokenizer.save_pretrained(folder / "model")
    write_recipe(folder, {"data.template": "chat"})


_TURNS = "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}{% endfor %}"
_BEGIN = "{% if add_generation_prompt %}<a>{% endif %}"


def _chat(template: str, **changes: Any) -> Callable[[Path], object]:
    def plant(folder: Path) -> None:
        (folder / "model/chat_template.jinja").write_text(template, encoding="utf-8")
        tokenizer = make_tokenizer()
        tokenizer.add_tokens(["<u>", "<a>", "<s>", "<", ">"])  # nothing is lost, and none of them is special
        tokenizer.save_pretrained(folder / "model")
        random_model("qwen2", vocab_size=len(tokenizer)).save_pretrained(folder / "model")
        write_recipe(folder, {"data.template": "chat"} | {k.replace("__", "."): v for k, v in changes.items()})

    return plant


def _larger_tokenizer(folder: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["abc", "def"])
    tokenizer.save_pretrained(folder / "model")


def _other_tokenizer(folder: Path) -> None:
    """The same letters by other numbers."""
    shutil.copytree(folder / "model", folder / "other")
    for name in ("model.safetensors", "config.json"):
        (folder / "other" / name).unlink()
    found = json.loads((folder / "other/tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = found["model"]["vocab"]
    letters = [token for token in vocabulary if not token.startswith("<")]
    numbers = [vocabulary[token] for token in letters]
    vocabulary |= dict(zip(letters, numbers[1:] + numbers[:1], strict=True))
    (folder / "other/tokenizer.json").write_text(json.dumps(found), encoding="utf-8")
    write_recipe(folder, {"model.tokenizer": "./other"})


def _larger_model(folder: Path) -> None:
    random_model("qwen2", vocab_size=2048).save_pretrained(folder / "model")


def _adapter(folder: Path) -> None:
    edit_json(folder / "model/adapter_config.json", peft_type="LORA", base_model_name_or_path=str(folder), r=4)
    shutil.copy(folder / "model/model.safetensors", folder / "model/adapter_model.safetensors")


def _adapter_alone(folder: Path) -> None:
    _adapter(folder)
    edit_json(folder / "model/adapter_config.json", base_model_name_or_path="../gone/base")


def _slow(folder: Path) -> None:
    (folder / "checker.py").write_text(
        "import time\n\ndef score(response, answer):\n    time.sleep(9)\n", encoding="utf-8"
    )
    reward = {"kind": "function", "function": "checker.py:score", "workers": 2, "timeout_s": 0.2}
    write_recipe(folder, {"reward": reward})


def _run_folder(folder: Path) -> None:
    (folder / "runs/recipe").mkdir(parents=True)
    (folder / "runs/recipe/metrics.jsonl").touch()


def _unreadable(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**line, "answer": "\\frac{1}{"} if place < 3 else line for place, line in enumerate(lines)]


MISTAKES: dict[str, Mistake] = {
    # the recipe
    "a key that is misspelt": Mistake("recipe", "fail", _recipe(training__learning_rte=1e-6), "learning_rate"),
    "a batch that cannot be cut": Mistake("recipe", "fail", _recipe(training__groups_per_update=3), "use 2 or 4"),
    "a section that is wrong": Mistake("recipe", "fail", _recipe(rollout__learning_rate=1.0), "rollout.learning_rate"),
    "greedy rollouts": Mistake("recipe", "fail", _recipe(rollout__temperature=0), "temperature"),
    "a learning rate for another optimizer": Mistake(
        "settings", "warn", _recipe(training__learning_rate=0.1), "training.learning_rate=1.0e-6"
    ),
    "old samples that nothing corrects": Mistake(
        "correction", "warn", _recipe(rollout__max_staleness=1), "truncate", also=frozenset({"ahead"})
    ),
    "a learning rate that moves nothing": Mistake(
        "settings", "warn", _recipe(training__learning_rate=1e-12), "training.learning_rate=1.0e-6"
    ),
    "a pair for a group": Mistake("settings", "warn", _recipe(rollout__samples_per_prompt=2), "samples_per_prompt=8"),
    "a punishment that outweighs the reward": Mistake(
        "settings", "warn", _recipe(algorithm__overlong_buffer__penalty_factor=100.0), "penalty_factor=1.0"
    ),
    "a warm-up longer than the run": Mistake(
        "settings", "warn", _recipe(training__warmup_steps=20, training__steps=15), "warmup_steps=1"
    ),
    "one update a step": Mistake("settings", "warn", _recipe(training__groups_per_update=8), "clipping does nothing"),
    "a reward for failed scores": Mistake(
        "settings", "warn", _recipe(reward__on_error="value", reward__error_value=1.0), "error_value=-1.0"
    ),
    "answers that are shuffled": Mistake("settings", "warn", _recipe(data__shuffle_answers=True), "nothing can be"),
    "clipping turned the wrong way": Mistake(
        "settings", "warn", _recipe(algorithm__clip_ratio_high=0.1), "opposite of Clip-Higher"
    ),
    # the data
    "a file that is not there": Mistake("files", "fail", _recipe(data__train="tarin.jsonl"), "tarin.jsonl"),
    "a line that is cut": Mistake("bad-rows", "fail", _cut_line, "train.jsonl:61"),
    "another name of the prompt": Mistake("bad-rows", "fail", _recipe(data__prompt_key="question"), "data.prompt_key"),
    "another name of the answer": Mistake("bad-rows", "fail", _recipe(data__answer_key="gold"), "answer_key"),
    "rows that are there twice": Mistake("duplicates", "warn", _rows(lambda all_: all_ + all_[:5]), "5 of 65"),
    "a prompt with two answers": Mistake(
        "conflicts", "warn", _rows(lambda all_: [*all_, {"prompt": "0+1=", "answer": "2"}]), "'1'"
    ),
    "prompts that are too long": Mistake(
        "too-long", "warn", _rows(lambda all_: [*all_, {"prompt": "1+" * 12 + "1=", "answer": "13"}]), "=26"
    ),
    "only prompts that are too long": Mistake("too-long", "fail", _recipe(data__max_prompt_length=2), "=4 takes them"),
    "held-out rows in the training data": Mistake(
        "overlap", "warn", _rows(lambda all_: all_ + rows(6, 7)), "10 of 70 rows to train on (14.3%)"
    ),
    "fewer rows than a step needs": Mistake("rows", "fail", _rows(lambda all_: all_[:6]), "rollout.prompts_per_step=4"),
    "rows that went through a template": Mistake(
        "special-tokens", "warn", _rows(lambda all_: [{**r, "prompt": r["prompt"] + "<end>1"} for r in all_]), "<end>"
    ),
    "a tokenizer that does not know the letters": Mistake(
        "unknown-tokens", "warn", _rows(lambda all_: [{**r, "prompt": "?" + r["prompt"]} for r in all_]), "60 of 60"
    ),
    "one answer for all": Mistake("answers", "warn", _rows(lambda all_: [{**r, "answer": "7"} for r in all_]), "'7'"),
    "whole solutions as answers": Mistake(
        "answers",
        "warn",
        lambda f: (
            write_rows(f, [{**r, "answer": f"We add. #### {r['answer']}"} for r in rows(0, 6)]),
            write_recipe(f, {"reward": {"kind": "exact"}}),
        ),
        "data.answer_key",
    ),
    "whole solutions as answers to evaluate on": Mistake(
        "answers",
        "warn",
        lambda f: (
            write_rows(f, [{**r, "answer": f"We add. #### {r['answer']}"} for r in rows(6, 8)], "heldout.jsonl"),
            write_recipe(f, {"reward": {"kind": "exact"}}),
        ),
        "evaluation.data: 20 of 20 answers are whole solutions",
    ),
    "whole solutions under a key of the item's own": Mistake(
        "answers",
        "warn",
        lambda f: (
            write_rows(
                f, [{"prompt": r["prompt"], "gold": f"We add. #### {r['answer']}"} for r in rows(6, 8)], "heldout.jsonl"
            ),
            write_recipe(
                f, {"reward": {"kind": "exact"}, "evaluation.data": {"path": "heldout.jsonl", "answer_key": "gold"}}
            ),
        ),
        'row["gold"] = row["gold"].rpartition',
    ),
    "prompts that hold their answer": Mistake(
        "answer-shown",
        "warn",
        _rows(lambda all_: [{"prompt": f"{1000 + k}=", "answer": str(1000 + k)} for k in range(60)]),
        "data.prompt_key",
    ),
    "prompts that end in their answer": Mistake(
        "answer-shown",
        "warn",
        _rows(lambda all_: [{**r, "prompt": r["prompt"] + r["answer"] * (k == 4)} for k, r in enumerate(all_)]),
        "row 5 ends in",
    ),
    "prompts that hold the solution": Mistake(
        "answer-shown",
        "warn",
        lambda f: (
            write_rows(f, [_with_solution(r, shown=k < 7) for k, r in enumerate(rows(0, 6))]),
            write_recipe(f, {"data.max_prompt_length": 40, "rollout.max_response_length": 30}),
        ),
        "7 of",
    ),
    "no room for the solutions": Mistake(
        "answer-length",
        "warn",
        lambda f: (
            write_rows(f, [_with_solution(r) for r in rows(0, 6)]),
            write_recipe(f, {"data.max_prompt_length": 10, "training.tokens_per_micro_batch": 31}),
        ),
        "rollout.max_response_length=29 training.tokens_per_micro_batch=39",
    ),
    "no room for the answers": Mistake(
        "answer-length",
        "warn",
        _rows(lambda all_: [{**r, "answer": r["answer"] * 30} if k == 7 else r for k, r in enumerate(all_)]),
        "1 of 60 answers",
    ),
    "a backslash that was eaten in a row": Mistake(
        "control-characters",
        "warn",
        _rows(lambda all_: [{**all_[0], "note": "\boxed{}"}, *all_[1:]]),
        "note holds the control character '\\x08' where \\boxed was probably meant",
    ),
    "a word in place of an answer": Mistake(
        "placeholders",
        "warn",
        _rows(lambda all_: [all_[0], {**all_[1], "answer": "N/A"}, *all_[2:]]),
        "1 rows have a placeholder for an answer, such as train.jsonl:2: answer is 'N/A'",
    ),
    "a backslash that was eaten in the recipe": Mistake(
        "settings", "warn", _recipe(data__instruction="Use \frac."), "data.instruction holds the control character"
    ),
    "integers that became floats": Mistake(
        "gold-as-written",
        "warn",
        _rows(lambda all_: [{**r, "answer": r["answer"] + ".0"} for r in all_]),
        "are wrong as a model would write them",
    ),
    "answers with their marker": Mistake(
        "gold-is-right",
        "fail",
        _rows(lambda all_: [{**r, "answer": "#" + r["answer"]} for r in all_]),
        'removeprefix("#")',
    ),
    "answers with their marker, for a reward without one": Mistake(
        "answers",
        "warn",
        lambda f: (
            write_rows(f, [{**r, "answer": f"#### {r['answer']}"} for r in rows(0, 6)]),
            write_recipe(f, {"reward": {"kind": "exact"}}),
        ),
        "reward.after='####'",
    ),
    "answers with their marker, as mathematics": Mistake(
        "gold-readable",
        "warn",
        lambda f: (
            write_rows(f, [{**r, "answer": f"#### {r['answer']}"} for r in rows(0, 6)]),
            write_recipe(f, {"reward": {"kind": "math", "workers": 1}}),
        ),
        'removeprefix("#### ")',
        also=frozenset({"answer-format"}),
    ),
    "lists of answers": Mistake(
        "bad-rows", "fail", _rows(lambda all_: [{**r, "answer": [r["answer"]]} for r in all_]), "one answer a row"
    ),
    "a table of commas": Mistake(
        "bad-rows",
        "fail",
        lambda f: (f / "train.jsonl").write_text("prompt,answer\n1+1=,2\n"),
        "JSON lines, a JSON array or Parquet",
    ),
    "another encoding": Mistake(
        "bad-rows",
        "fail",
        lambda f: (f / "train.jsonl").write_text((f / "train.jsonl").read_text(), encoding="utf-16"),
        "as UTF-8",
    ),
    "one prompt in all rows": Mistake(
        "conflicts", "warn", _rows(lambda all_: [{**r, "prompt": "0+0="} for r in all_]), "the key of the question"
    ),
    "a stop before the answer": Mistake("settings", "warn", _recipe(rollout__stop=["#"]), "rollout.stop=[]"),
    "an instruction beside that of the rows": Mistake(
        "instruction",
        "warn",
        lambda f: (
            write_rows(f, [{**r, "prompt": f"Answer: $Answer\n{r['prompt']}"} for r in rows(0, 6)]),
            write_recipe(f, {"data.instruction": " #", "data.max_prompt_length": 40}),
        ),
        "data.instruction=''",
        also={"unknown-tokens"},
    ),
    "chats that are answered already": Mistake(
        "last-turn",
        "warn",
        lambda f: (write_rows(f, [{**r, "prompt": _answered(r)} for r in rows(0, 6)]), _chat(_TURNS + _BEGIN)(f)),
        '["prompt"].pop()',
    ),
    # model and tokenizer
    "a template that begins no turn": Mistake("chat-template", "warn", _chat(_TURNS), "%}<a>{% endif %}"),
    "a template that drops the system message": Mistake(
        "chat-template",
        "warn",
        _chat(
            _TURNS.replace("<{", "{% if m['role'] == 'user' %}<{", 1).replace("{% endfor", "{% endif %}{% endfor")
            + _BEGIN,
            data__system="1+1=2",
        ),
        "data.instruction",
    ),
    "a file for a model": Mistake("model", "fail", _recipe(model__path="model/config.json"), "is a file"),
    "a model that is not there": Mistake("model", "fail", _recipe(model__path="./modell"), "no such folder"),
    "an adapter whose base is gone": Mistake("model", "fail", _adapter_alone, "base_model_name_or_path"),
    "an adapter whose base is no model": Mistake("model", "fail", _adapter, "model.path=FOLDER"),
    "an architecture that is not computed here": Mistake(
        "architecture", "fail", lambda f: edit_json(f / "model/config.json", model_type="bert"), "docs/models.md"
    ),
    "a chat without a template": Mistake("chat-template", "fail", _recipe(data__template="chat"), "template=plain"),
    "more tokens than the model has": Mistake("vocabulary", "fail", _larger_tokenizer, "model.tokenizer"),
    "the tokenizer of another model": Mistake("vocabulary", "warn", _other_tokenizer, "leave model.tokenizer out"),
    "fewer tokens than the model has": Mistake("vocabulary", "warn", _larger_model, "2,048 rows"),
    "an end that is no token": Mistake(
        "stop-tokens", "fail", lambda f: edit_json(f / "model/generation_config.json", eos_token_id=[1, 900]), "900"
    ),
    "turns that end otherwise": Mistake("stop-tokens", "warn", _other_end, "rollout.stop_token_ids=[17]"),
    "logits that are changed": Mistake(
        "generation-config",
        "warn",
        lambda f: edit_json(f / "model/generation_config.json", repetition_penalty=1.3),
        "repetition_penalty",
    ),
    "more tokens than positions": Mistake(
        "context",
        "fail",
        lambda f: edit_json(f / "model/config.json", max_position_embeddings=24),
        "max_prompt_length=",
    ),
    "a config that describes no model": Mistake(
        "adapter", "fail", lambda f: edit_json(f / "model/config.json", num_attention_heads=0), "describes none"
    ),
    "a config with a text for a number": Mistake(
        "model",
        "fail",
        lambda f: edit_json(f / "model/config.json", num_attention_heads="4"),
        "expected int, got str",
        also=frozenset({"tokenizer"}),
    ),
    "weights that are no numbers": Mistake(
        "weights", "fail", _weights(lambda t: t["model.norm.weight"].fill_(float("nan"))), "NaN"
    ),
    "weights that are not there": Mistake(
        "weights", "fail", _weights(lambda t: t.pop("model.norm.weight")), "model.norm.weight"
    ),
    "a damaged file of weights": Mistake(
        "weights", "fail", lambda f: (f / "model/model.safetensors").write_bytes(b"{}"), "cannot be loaded"
    ),
    # the reward
    "a function that is not there": Mistake(
        "reward", "fail", _recipe(reward={"kind": "function", "function": "nowhere.py:score"}), "reward.function"
    ),
    "a reward that is not a number": Mistake("reward", "fail", _function("float('nan')"), "nan"),
    "a reward that takes too long": Mistake("scores", "fail", _slow, "timed out"),
    "a verifier that likes everything": Mistake("shuffled-is-wrong", "fail", _function("True"), "empty responses"),
    "a verifier that likes nothing": Mistake("gold-is-right", "warn", _function("False"), "16 of 16"),
    "a verifier that likes silence": Mistake("empty-is-wrong", "fail", _function("response in answer"), "16 of 16"),
    "a verifier that likes lists": Mistake("list-is-wrong", "warn", _function("answer in response"), "learns to list"),
    "a verifier that fails on silence": Mistake(
        "empty-is-wrong", "warn", _function("response.split()[-1] == answer"), "IndexError"
    ),
    "an answer that nobody asked for": Mistake(
        "answer-format", "warn", _recipe(reward={"kind": "math", "workers": 1}), "data.template=dapo"
    ),
    "answers that cannot be read": Mistake(
        "gold-readable",
        "warn",
        lambda f: (write_rows(f, _unreadable(rows(0, 6))), write_recipe(f, {"reward": {"kind": "math", "workers": 1}})),
        "3 of 60",
        also=frozenset({"answer-format"}),
    ),
    "a server that does not answer": Mistake(
        "reward-server", "fail", _recipe(reward={"kind": "server", "url": "http://127.0.0.1:9"}), "reward.url"
    ),
    # the machine
    "a run folder that exists": Mistake("run-folder", "fail", _run_folder, "run.if_exists=rename"),
    "a run folder inside of a file": Mistake("run-folder", "fail", _recipe(run__dir="recipe.yaml/run"), "is a file"),
    "a GPU that is not there": Mistake("device", "fail", _recipe(runtime__device="cuda"), "runtime.device=auto"),
    "an engine's GPU that is not there": Mistake(
        "device", "fail", _recipe(rollout__device="cuda:7"), "rollout.device=null"
    ),
    # what only samples show
    "prompts beyond the model": Mistake("probe", "fail", _recipe(), "all wrong", ("--probe", "2")),
}
