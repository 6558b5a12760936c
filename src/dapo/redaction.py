"""Secrets are never written: what is under a key that looks like one's, or looks like one itself, is blanked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dapo.errors import ConfigError

BLANK = "(not recorded)"

_SECRET_KEY = re.compile(  # the last ones are words of their own: a monkey is no key, a path no pat
    r"(token|secrets?|passwords?|passwd|passphrase|credentials?|authorization|cookies?|bearer"
    r"|(api|access|secret|private|auth|sign|signing|master|openai)keys?"
    r"|(^|_)(keys?|key_?id|o?auth|pwd|pass|pat|jwt|creds?|session(_?id)?|private|signature|sig|sas))"
    r"(_(header|value|string|pem|b64|base64|json))?$"
)
_NO_SECRET = re.compile(
    r"(^|_)((prompt|answer|tests|entry_?point|solution)_?key|(pad|bos|eos|unk|sep|cls|mask|stop|start|end|per)_?token)$"
)
_SECRET_WORD = re.compile(r"key|token|secret|passw|pwd|auth|cookie|cred|bearer|jwt|sig|session", re.IGNORECASE)
_SECRET_ITEM = re.compile(r"^\s*([\w-]+)\s*:\s*\S")
_RANDOM = r"(?=[a-z_-]{0,24}(?:[A-Z]|\d[a-z_-]{0,24}[A-Z\d]))[\w-]{8,}"  # not a word of a language, as in sk-learn
_SECRET_VALUES = re.compile(
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)"
    rf"|\b(?:hf_|[spr]k[-_]|gh[pousr]_|github_pat_|glpat-|xox[a-z]-|gsk_|npm_|pypi-|nvapi-|dckr_pat_|AIza){_RANDOM}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{8,}|\bya29\.[\w-]{8,}|\beyJ[\w-]{6,2000}+(?:\.[\w-]*){1,4}"
    r"|(?<=://)[^/@\s]+(?=@)"  # the login in an address
    r"|(?<=\bBearer )(?=\S*[\d_A-Z]|\S{20})\S{5,}|(?<=\bBasic )(?=\S*[\d=]|[^\sa-z]*[a-z][^\sA-Z]*[A-Z])[\w+/=]{8,}",
    re.DOTALL,
)
_ASSIGNED = re.compile(r"(?<![\w.-])([\w.-]+)=([^&\s]+)")


def redact(value: Any, key: str = "") -> Any:
    """``value`` without secrets: what is under keys that are called like one, and what looks like one in any text."""
    if isinstance(value, Mapping):
        secret = key if is_secret(key) else ""
        return {_without_secrets(name): redact(item, secret or str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, key) for item in value]
    if is_secret(key) and value is not None and not isinstance(value, bool):
        return BLANK
    return _without_secrets(value)


def _without_secrets(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    header = _SECRET_ITEM.match(value)
    if header and is_secret(header[1]):  # "X-Api-Key: ..." in a list of headers
        return f"{header[1]}: {BLANK}"
    return _ASSIGNED.sub(_assigned, _SECRET_VALUES.sub(BLANK, value))


def _assigned(found: re.Match[str]) -> str:
    """``token=...`` in a query or in a line; a word of a language, as in "give it as key=value", stays."""
    name, value = found.groups()
    query = found.string[max(0, found.start() - 1) : found.start()] in ("?", "&") and _SECRET_WORD.search(name)
    return f"{name}={BLANK}" if query or (is_secret(name) and not value.islower()) else found[0]


def is_secret(key: str) -> bool:
    """Whether a value under this key is kept out of all files. ``X-API-Key``, ``apiKey`` and ``api_key`` are one."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^a-zA-Z0-9]+", "_", key).lower().rstrip("_0123456789")
    return bool(_SECRET_KEY.search(words)) and not _NO_SECRET.search(words)


def redact_command(command: Sequence[str]) -> list[str]:
    """A command line with secrets blanked: overrides ``some.api_key=...`` and logins in addresses."""
    words = []
    for word in command:
        key, equals, value = word.partition("=")
        # what a reward function is given may hold a secret under any name; config.yaml has it, by its keys
        given = key.startswith("reward.args") or (key == "reward" and "args" in value)
        hides = is_secret(key) or given or (":" in value and _SECRET_WORD.search(value))
        first, equals, rest = (f"{key}={BLANK}" if equals and hides else str(redact(word))).partition("=")
        words.append(f"{first}{equals}{redact(rest)}")
    return words


def blanks(value: Any, key: str = "") -> Iterator[str]:
    """The keys whose values were blanked."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from blanks(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for item in value:
            yield from blanks(item, key)
    elif isinstance(value, str) and BLANK in value:
        yield key


def require_secrets(value: Any, place: object, remedy: str, key: str = "") -> None:
    """Refuse a recipe that was read from a run folder, as long as secrets are blank in it.
    ``value``: the recipe's keys and values, or those below ``key``.

    Raises:
        ConfigError: some are blank.
    """
    if hidden := list(blanks(value, key)):
        raise ConfigError(f"{place}: secrets are not kept in a run folder: give {', '.join(hidden)} again, {remedy}")
