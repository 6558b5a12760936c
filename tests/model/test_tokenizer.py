"""The loaded tokenizer is the one of tokenizer.json, whatever its class is called, and is written as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from dapo.commands.demo.task import make_model, make_tokenizer
from dapo.errors import ModelError
from dapo.model.loading import load_tokenizer
from dapo.model.tokenizer import save_tokenizer
from helpers import random_model

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
ROLES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<p>"}
TEXTS = ("Work in steps.\n\n2023", "It's  1234567\t\n\n\nend </s><s>x", "Ünï ﬁ 数 🙂")


def backend(bos: bool = False) -> Any:
    """Bytes, with one merge that GPT-2's own pre-tokenizer never lets happen: a full stop and two line ends."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*alphabet, "ĊĊ", ".ĊĊ", "<unk>"])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ"), (".", "ĊĊ")]))
    parts = [pre_tokenizers.Split(Regex(CL100K), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    made.pre_tokenizer = pre_tokenizers.Sequence(parts)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ROLES.values()])
    start = "<s> $A" if bos else "$A"
    known = [("<s>", made.token_to_id("<s>"))] if bos else []
    made.post_processor = processors.TemplateProcessing(single=start, pair=f"{start} $B", special_tokens=known)
    return made


def folder_of(folder: Path, made: Any, **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(ROLES | settings), encoding="utf-8")
    return folder


CLASSES = (
    "PreTrainedTokenizerFast",
    "LlamaTokenizer",
    "GemmaTokenizer",
    "GPT2Tokenizer",
    "Qwen2Tokenizer",
    "BertTokenizer",
)


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("kind", CLASSES)
def test_ids_are_those_of_tokenizer_json_for_every_class(kind: str, bos: bool, tmp_path: Path) -> None:
    made = backend(bos)
    assert ".ĊĊ" in made.encode(TEXTS[0]).tokens
    folder = folder_of(tmp_path / "from", made, tokenizer_class=kind, chat_template="{{ messages }}")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    loaded = load_tokenizer(str(folder))
    (tmp_path / "to").mkdir()
    loaded.chat_template = "{{ messages[0] }}"
    save_tokenizer(loaded, tmp_path / "to")
    again = load_tokenizer(str(tmp_path / "to"))
    for text in TEXTS:
        assert loaded(text)["input_ids"] == again(text)["input_ids"] == made.encode(text).ids
    assert loaded.special_tokens_map == again.special_tokens_map == ROLES
    assert again.chat_template == "{{ messages[0] }}"
    for name in ("tokenizer.json", "merges.txt"):
        assert (tmp_path / "to" / name).read_bytes() == (folder / name).read_bytes()
    written = json.loads((tmp_path / "to/tokenizer_config.json").read_text(encoding="utf-8"))
    assert written["tokenizer_class"] in ("PreTrainedTokenizerFast", kind), "Transformers 4 knows no other"
    assert written["chat_template"] == "{{ messages[0] }}" and written["add_bos_token"] is bos
    assert [written["added_tokens_decoder"][str(259 + i)]["content"] for i in range(3)] == ["<s>", "</s>", "<p>"]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma", "mistral", "gpt2"])
def test_a_model_beside_it_changes_nothing(kind: str, tmp_path: Path) -> None:
    random_model(kind).config.save_pretrained(tmp_path)
    made = backend()
    made.normalizer = normalizers.NFKC()
    loaded = load_tokenizer(str(folder_of(tmp_path, made)))
    assert [loaded(text)["input_ids"] for text in TEXTS] == [made.encode(text).ids for text in TEXTS]


def test_tokens_beside_tokenizer_json_are_added_and_no_others(tmp_path: Path) -> None:
    more = {"content": "<new>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    added = {"added_tokens_decoder": {"262": more | {"special": True}}, "additional_special_tokens": ["<new>"]}
    loaded = load_tokenizer(str(folder_of(tmp_path, backend(), tokenizer_class="GPT2Tokenizer", **added)))
    assert loaded("a<new>")["input_ids"][-1] == 262 and len(loaded) == 263, "GPT-2's <|endoftext|> is not among them"
    (tmp_path / "to").mkdir()
    save_tokenizer(loaded, tmp_path / "to")
    assert load_tokenizer(str(tmp_path / "to"))("a<new>")["input_ids"][-1] == 262
    written = json.loads((tmp_path / "to/tokenizer_config.json").read_text(encoding="utf-8"))
    assert written["additional_special_tokens"] == ["<new>"] and "extra_special_tokens" not in written


def test_where_tokens_are_found_in_a_text_is_said_by_tokenizer_json(tmp_path: Path) -> None:
    flags = {
        "content": "</s>",
        "lstrip": True,
        "rstrip": True,
        "normalized": False,
        "single_word": False,
        "special": True,
    }
    loaded = load_tokenizer(str(folder_of(tmp_path, backend(), added_tokens_decoder={"260": flags})))
    assert loaded("a </s> b")["input_ids"] == backend().encode("a </s> b").ids


def test_contradictions_are_refused(tmp_path: Path) -> None:
    flags = {"content": "<new>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    added = {"300": flags | {"special": True}}
    with pytest.raises(ModelError, match=r"gives '<new>' the id 300 .* but with tokenizer\.json it gets 262"):
        load_tokenizer(str(folder_of(tmp_path, backend(), added_tokens_decoder=added)))


def test_one_that_was_changed_since_is_written_as_it_is(tmp_path: Path) -> None:
    loaded = load_tokenizer(str(folder_of(tmp_path / "from", backend(), tokenizer_class="GPT2Tokenizer")))
    loaded.add_special_tokens({"additional_special_tokens": ["<new>"]})
    (tmp_path / "to").mkdir()
    save_tokenizer(loaded, tmp_path / "to")
    again = load_tokenizer(str(tmp_path / "to"))
    assert again("a\n\n<new>")["input_ids"] == loaded("a\n\n<new>")["input_ids"]
    assert again("<new>")["input_ids"] == [262]


def test_the_demos_model_gets_no_tokens_from_the_class_of_its_model_type(tmp_path: Path) -> None:
    """Transformers 5 takes the class by the model's type, whose own unknown token would be one more id than the model
    has rows. Ids by hand: padding, end, ten digits, then + - * = ; #."""
    from transformers import AutoTokenizer

    made = make_tokenizer()
    make_model(0, len(made)).save_pretrained(tmp_path)
    save_tokenizer(made, tmp_path)
    found = AutoTokenizer.from_pretrained(tmp_path)
    assert type(found).__name__ == "Qwen2Tokenizer", "otherwise nothing is tested here"
    assert found("7*3+4=#1").input_ids == [9, 14, 5, 12, 6, 15, 17, 3] == made("7*3+4=#1").input_ids
    assert found.special_tokens_map == {"pad_token": "<pad>", "eos_token": "<end>"} == made.special_tokens_map
    assert len(found) == len(made) == 18 and found.get_vocab() == made.get_vocab()
