"""Secrets are never written: what is under a key that looks like one's, and passwords in addresses, is blanked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dapo.errors import ConfigError

BLANK = "(not recorded)"

_SECRET_ENDINGS = (
    *("key", "keys", "keyid", "token", "secret", "secrets", "password", "passwords", "passwd", "pwd", "passphrase"),
    *("auth", "authorization", "credential", "credentials", "bearer", "cookie"),
)
_SECRET_WORD = re.compile(r"key|token|secret|passw|pwd|auth|cookie|credential|bearer", re.IGNORECASE)
_SECRET_ITEM = re.compile(r"^\s*([\w-]+)\s*:\s*\S")
_NO_SECRETS = ("promptkey", "answerkey", "testskey", "entrypointkey", "solutionkey")
_SECRET_QUERY = re.compile(r"(?<=[?&])([^=&\s]*(?:key|token|secret|password|auth|sig)[^=&\s]*)=[^&\s]+", re.IGNORECASE)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+\S+", re.IGNORECASE)
_ADDRESS_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def redact(value: Any, key: str = "") -> Any:
    """``value`` with what is under secret-looking keys, and logins in addresses, blanked."""
    if isinstance(value, Mapping):
        secret = key if is_secret(key) else ""
        return {name: redact(item, secret or str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, key) for item in value]
    if is_secret(key) and value is not None and not isinstance(value, bool):
        return BLANK
    if not isinstance(value, str):
        return value
    header = _SECRET_ITEM.match(value)
    if header and is_secret(header[1]):  # "X-Api-Key: ..." in a list of headers
        return f"{header[1]}: {BLANK}"
    value = _SECRET_QUERY.sub(rf"\1={BLANK}", _ADDRESS_LOGIN.sub(BLANK, value))
    return _BEARER.sub(rf"\1 {BLANK}", value)


def is_secret(key: str) -> bool:
    """Whether a value under this key is kept out of all files. ``X-API-Key``, ``apiKey`` and ``api_key`` are one."""
    name = re.sub(r"[^a-z0-9]", "", key.lower()).rstrip("0123456789")
    return name.endswith(_SECRET_ENDINGS) and not name.endswith(_NO_SECRETS)


def redact_command(command: Sequence[str]) -> list[str]:
    """A command line with secrets blanked: overrides ``some.api_key=...`` and logins in addresses."""
    words = []
    for word in command:
        key, equals, value = word.partition("=")
        # what a reward function is given may hold a secret under any name; config.yaml has it, by its keys
        given = key.startswith("reward.args") or (key == "reward" and "args" in value)
        hides = is_secret(key) or given or (":" in value and _SECRET_WORD.search(value))
        words.append(f"{key}={BLANK}" if equals and hides else str(redact(word)))
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

    Args:
        value: the recipe's keys and values, or those below ``key``.
        place: where it was read.
        remedy: how they are given.

    Raises:
        ConfigError: some are blank.
    """
    if hidden := list(blanks(value, key)):
        raise ConfigError(f"{place}: secrets are not kept in a run folder: give {', '.join(hidden)} again, {remedy}")
