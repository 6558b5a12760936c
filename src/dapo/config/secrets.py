"""Secrets are never written: what is under a key that looks like one's, or looks like one itself, is blanked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dapo.errors import ConfigError
from dapo.util.escapes import texts_in

BLANK = "(not recorded)"

_OF_KEYS = "(api|access|secret|private|auth|sign|signing|master|openai|account|encryption|subscription)"
_SECRET_KEY = re.compile(  # the last ones are words of their own: a monkey is no key, a path no pat
    r"(token|secrets?|secret_?id|passwords?|passwort|passwd|passphrase|credentials?|authorization|cookies?|bearer"
    r"|(?<!mon)(?<!don)(?<!tur)(?<!hoc)(?<!joc)(?<!whis)keys?|(api|access|auth|bearer|refresh|secret)_?tokens"
    r"|(^|_)(keys?|key_?id|o?auth|pwd|pass|pat|jwt|creds?|session(_?id)?|private|signature|sig|sas|hmac|t?otp|pin|csrf))"
    r"(_(header|value|string|pem|b64|base64|json))?$"
)
_MAYBE_KEY = re.compile(rf"(?!.*{_OF_KEYS}_?keys?$)(.*_)?(keys?|pat|sig|signature)$")
_WORDS = re.compile(r"[A-Za-z][a-z]{0,15}([_ .][a-z]{1,16}){0,3}\.?|\d{1,3}|.*[()\\].*")
"""What is no secret under keys that often are none, as in ``sort_key: name`` or ``signature: f(x)``."""
_MARK = re.compile(r"[<\[][a-zA-Z_|/: ]{1,40}[>\]]|[^\w\s]{1,3}")
"""What is no secret under any: `<think>` and `#` are tokens of another kind."""
_NO_SECRET = re.compile(
    r"(^|_)((prompt|answer|tests|entry_?point|solution)_?key|(pad|bos|eos|unk|sep|cls|mask|stop|start|end|per)_?token)$"
)
_SECRET_WORD = re.compile(r"key|token|secret|passw|pwd|auth|cookie|cred|bearer|jwt|sig|session", re.IGNORECASE)
_SECRET_ITEM = re.compile(r"^\s*([\w-]+)\s*:\s*(\S.*)", re.DOTALL)
_RANDOM = r"(?=[a-z_-]{0,24}(?:[A-Z]|\d[a-z_-]{0,24}[A-Z\d]))[\w.-]{8,}|[a-z\d]{24,}"  # no words, as in sk-learn
_SECRET_VALUES = re.compile(
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)"
    rf"|(?<![\w/])(?:hf_|[spr]k[-_]|gh[pousr]_|github_pat_|glpat-|xox[a-z]-|gsk_|npm_|pypi-|nvapi-|dckr_pat_|AIza)(?:{_RANDOM})"
    rf"|(?<![\w/])(?:SG\.|r8_|fw_|tgp_|do[opr]_v1_|pplx-|xai-|pcsk_|shp[a-z]{{2}}_|lin_api_|ATATT|whsec_)(?=[\w.-]{{16}})(?:{_RANDOM})"
    r"|\b(?:dapi|SK)[a-z0-9]{28,}|\b\d{8,10}:AA[\w-]{30,}"
    r"|(?:(?<=//hooks\.slack\.com/)|(?<=/api/webhooks/)|(?<=\.webhook\.office\.com/))[^\s\"']+"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{8,}|\bya29\.[\w-]{8,}|\beyJ[\w-]{6,2000}+(?:\.[\w-]*){1,4}"
    r"|(?<=://)[^/?#\s]+(?=@)"  # the login in an address
    r"|(?<=\bBearer )(?=\S*[\d_A-Z]|\S{20})\S{5,}|(?<=\bBasic )(?=\S*[\d=]|[^\sa-z]*[a-z][^\sA-Z]*[A-Z])[\w+/=]{8,}",
    re.DOTALL,
)
_VALUE = r"(\"[^\"\n]*\"|'[^'\n]*'|[^&;\s]+)"
_ASSIGNED = re.compile(rf"(?<![\w.-])([\w.-]+)(=){_VALUE}|(?<!\S)--([\w-]{{2,60}})([ \t]{{1,8}})(?!-){_VALUE}")
_QUOTED = re.compile(r"([\"']([\w-]{2,60})(?:\\?[\"']\s{0,8}:\s{0,8}\\?[\"']|:\s{0,8}))([^\"'\n]+)")
"""In JSON, and a header in a command: ``curl -H 'X-Api-Key: ...'``."""


def redact(value: Any, key: str = "") -> Any:
    """``value`` without secrets: what is under keys that are called like one, and what looks like one in any text."""
    if isinstance(value, Mapping):
        secret = key if is_secret(key) else ""
        return {_without_secrets(name): redact(item, secret or str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, _flag(before) or key) for before, item in zip(("", *value), value, strict=False)]
    if _hides(key, value):
        return BLANK
    return _without_secrets(value)


def _without_secrets(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    header = _SECRET_ITEM.match(value)
    if header and _hides(header[1], header[2].strip()):  # "X-Api-Key: ..." in a list of headers
        return f"{header[1]}: {BLANK}"
    value = _QUOTED.sub(lambda found: found[1] + (BLANK if _hides(found[2], found[3]) else found[3]), value)
    return _ASSIGNED.sub(_assigned, _SECRET_VALUES.sub(BLANK, value))


def _assigned(found: re.Match[str]) -> str:
    """``token=...`` in a query or in a line; a word of a language, as in "give it as key=value", stays."""
    name, _, value = (part for part in found.groups() if part is not None)
    query = found.string[max(0, found.start() - 1) : found.start()] in ("?", "&") and _SECRET_WORD.search(name)
    return f"{found[0][: -len(value)]}{BLANK}" if query or _hides(name, value.strip("\"'")) else found[0]


def _flag(word: Any) -> str:
    """The name of a flag whose value, the next word, is a secret; otherwise nothing."""
    return word if isinstance(word, str) and re.fullmatch(r"--?[\w-]+", word) and is_secret(word) else ""


def _hides(key: str, value: Any) -> bool:
    if not is_secret(key) or value is None or isinstance(value, bool | float) or _MARK.fullmatch(str(value)):
        return False
    return not (_MAYBE_KEY.match(_words(key)) and _WORDS.fullmatch(str(value)))


def _words(key: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^a-zA-Z0-9]+", "_", key).lower().rstrip("_0123456789")


def is_secret(key: str) -> bool:
    """Whether a value under this key is kept out of all files. ``X-API-Key``, ``apiKey`` and ``api_key`` are one."""
    words = _words(key)
    return bool(_SECRET_KEY.search(words)) and not _NO_SECRET.search(words)


def redact_command(command: Sequence[str]) -> list[str]:
    """A command line with secrets blanked: overrides ``some.api_key=...`` and logins in addresses."""
    words: list[str] = []
    for before, word in zip(("", *command), command, strict=False):
        if (flag := _flag(before)) and not word.startswith("-"):
            words.append(str(redact(word, flag)))
            continue
        key, equals, value = word.partition("=")
        # what a reward function is given may hold a secret under any name; config.yaml has it, by its keys
        given = re.search(r"(^|\.)reward(\.|$)", key) and (".args" in key or re.search(r"\bargs\W?:", value))
        hides = _hides(key, value) or given or (":" in value and _SECRET_WORD.search(value))
        first, equals, rest = (f"{key}={BLANK}" if equals and hides else str(redact(word))).partition("=")
        words.append(f"{first}{equals}{redact(rest)}")
    return words


def require_secrets(value: Any, place: object, remedy: str, key: str = "") -> None:
    """Refuse a recipe that was read from a run folder, as long as secrets are blank in it. ``value``: the recipe's keys
    and values, or those below ``key``.
    Raises ConfigError: some are blank."""
    if hidden := [re.sub(r"\[\d+\]", "", name) for name, text in texts_in(value, key) if BLANK in text]:
        raise ConfigError(f"{place}: secrets are not kept in a run folder: give {', '.join(hidden)} again, {remedy}")
