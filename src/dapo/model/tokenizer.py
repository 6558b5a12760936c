"""A tokenizer that does what its own tokenizer.json says, whatever class Transformers makes of it, and is saved so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dapo.errors import ModelError
from dapo.model.hub import from_where, is_name
from dapo.util.files import write_json

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
_SETTINGS = (CONFIG, "special_tokens_map.json", "added_tokens.json")
_FILES = (FILE, *_SETTINGS, "vocab.json", "vocab.txt", "merges.txt", "*.model", "tekken.json")
_PARTS = ("normalizer", "pre_tokenizer", "model", "post_processor", "decoder")
_MATCHING = ("single_word", "lstrip", "rstrip", "normalized")  # what decides where in a text an added token is found
_PROBES = ("It's 1234567 + 89.5\n\n\n  don't  \tstop\r\n", "Ünïcödé ﬁ 数学 🙂 e\u0301", " leading, trailing ")


def source_folder(name: str) -> Path | None:
    """The folder that the model or tokenizer ``name`` was read from: itself, or its place in the cache of downloads."""
    if name and Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    from huggingface_hub import try_to_load_from_cache

    for file in ("config.json", CONFIG) if is_name(name) else ():
        if isinstance(found := try_to_load_from_cache(name, file), str):
            return Path(found).parent
    return None


def tokenizer_files(name: str) -> dict[str, bytes]:
    """The files that make up the tokenizer ``name``, as they are now, by their names."""
    folder = source_folder(name)
    return {path.name: path.read_bytes() for pattern in _FILES for path in (folder.glob(pattern) if folder else ())}


def as_its_file_says(tokenizer: Any, name: str) -> Any:
    """``tokenizer``, or where its class splits texts in another way than its tokenizer.json, one made from that file.

    Transformers 5 makes many classes from the vocabulary alone, with a normalizer and pre-tokenizer of the class's own.
    Token ids would then not be those that the model was trained on, nor those of other programs. Which tokens begin
    and end texts, and the chat template, stay as tokenizer_config.json says. The files stay with the tokenizer, as
    ``source_files``, for :func:`save_tokenizer`.
    ``name``: what it was loaded by. Without a tokenizer.json there is nothing to compare with.
    Raises ModelError: the files contradict each other, or what they say cannot be had."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    files = tokenizer_files(name)
    if FILE in files:
        said = Tokenizer.from_str(files[FILE].decode("utf-8"))
        settings = [json.loads(files[file]) for file in _SETTINGS if file in files]
        named = set(_texts(settings))
        if _differences(tokenizer, said, named):
            own = {token.content for token in said.get_added_tokens_decoder().values()}
            roles = {role: text for role, text in tokenizer.special_tokens_map.items() if text in own}
            inputs = tokenizer.model_input_names
            tokenizer = PreTrainedTokenizerFast.from_pretrained(name, **roles, **from_where(name))
            tokenizer.model_input_names = inputs
            if found := _differences(tokenizer, said, named):
                raise ModelError(
                    f"tokenizer {name}: {FILE} is not what Transformers makes of the folder ({', '.join(found)}), so "
                    "token ids would be other ones elsewhere; load it where it is right, save it with save_pretrained "
                    "and name that folder"
                )
    stated = json.loads(files.get(CONFIG, b"{}")).get("added_tokens_decoder") or {}
    known = tokenizer.get_vocab() if stated else {}
    for number, token in stated.items():
        text = token["content"] if isinstance(token, dict) else token
        if known.get(text) != int(number):
            raise ModelError(
                f"tokenizer {name}: {CONFIG} gives {text!r} the id {number} (added_tokens_decoder), but with {FILE} it "
                f"gets {known.get(text)}; make the two agree"
            )
    tokenizer.source_files = files, _state(tokenizer)
    return tokenizer


def _differences(tokenizer: Any, said: Any, named: set[str]) -> list[str]:
    """In what ``tokenizer`` is another one than ``said``, of the file, with the tokens that are ``named`` beside it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return [f"{type(tokenizer).__name__} does not read it"]
    own = {token.content: token for token in said.get_added_tokens_decoder().values()}
    for _, token in sorted(backend.get_added_tokens_decoder().items()):
        if token.content in own:
            flags = {flag: getattr(own[token.content], flag) for flag in _MATCHING}
            if any(getattr(token, flag) != value for flag, value in flags.items()):
                backend.add_tokens([type(token)(token.content, special=token.special, **flags)])
        elif token.content in named:
            (said.add_special_tokens if token.special else said.add_tokens)([token])
    ours, theirs = ({t.content: i for i, t in one.get_added_tokens_decoder().items()} for one in (said, backend))
    found: list[str] = []
    if (texts := [said.to_str(), backend.to_str()])[0] != texts[1]:  # mostly they are the same, and take long to parse
        wanted, made = map(json.loads, texts)
        if wanted["post_processor"] is None and backend.num_special_tokens_to_add(is_pair=False) == 0:
            wanted["post_processor"] = made["post_processor"]  # Transformers always puts one there
        found = [part for part in _PARTS if wanted[part] != made[part]]
        found += [f"added token {text!r}" for text in sorted({*ours, *theirs}) if ours.get(text) != theirs.get(text)]
    if found:
        return found
    said.no_truncation()
    said.no_padding()
    said.encode_special_tokens = backend.encode_special_tokens
    for text in (*_PROBES, " a ".join(ours)):  # a class may also change texts before they get there
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if ids != said.encode(text, add_special_tokens=False).ids:
            found.append(f"the ids of {text!r}")
    return found


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value of JSON, keys too: those of added_tokens.json are tokens."""
    if isinstance(value, str):
        yield value
    items = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        yield from _texts(item)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write it so that Transformers 4 and 5 and other programs read what this run used: files as they were loaded,
    the chat template that prompts were written by, and a class that leaves tokenizer.json as it is."""
    tokenizer.save_pretrained(folder)
    file = folder / CONFIG
    if not file.is_file():
        return
    settings = json.loads(file.read_text(encoding="utf-8"))
    nothing: tuple[dict[str, bytes], None] = {}, None
    files, state = getattr(tokenizer, "source_files", nothing)
    if files and state == _state(tokenizer):  # otherwise tokens were added to it since
        for name, content in files.items():
            (folder / name).write_bytes(content)
        settings = json.loads(files.get(CONFIG, b"{}")) | {"tokenizer_class": settings["tokenizer_class"]}
        settings |= tokenizer.special_tokens_map
    if settings["tokenizer_class"] == "TokenizersBackend":  # of Transformers 5 alone
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):  # to Transformers 4 a mapping
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    if getattr(tokenizer, "backend_tokenizer", None) is not None:
        # tokenizer.json has been followed where these said something else; classes of Transformers 4 go by these
        settings["added_tokens_decoder"] = {i: t.__getstate__() for i, t in tokenizer.added_tokens_decoder.items()}
        ids = list(tokenizer("x")["input_ids"])
        settings["add_bos_token"] = ids[:1] == [tokenizer.bos_token_id]
        settings["add_eos_token"] = ids[-1:] == [tokenizer.eos_token_id]
    for role in ("bos_token", "eos_token", "unk_token", "pad_token"):  # classes have their own where nothing is said
        settings.setdefault(role, None)
    settings.pop("chat_template", None)
    if isinstance(tokenizer.chat_template, str):  # also in a file of its own, which versions before 4.43 do not read
        settings["chat_template"] = tokenizer.chat_template
    write_json(file, settings)


def _state(tokenizer: Any) -> int:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return hash((backend.to_str() if backend else str(tokenizer.get_vocab()), str(tokenizer.special_tokens_map)))
