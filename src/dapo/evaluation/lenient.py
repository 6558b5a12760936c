"""Right or wrong whatever the format: the last number of a response against a reference that is a number.

It tells what a model can work out from how it is told to write it down. It is a measure and no reward: a response that
ends with the right number for another reason counts, too.
"""

from __future__ import annotations

import re
from decimal import Decimal

_DIGITS = r"[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?"
_NUMBER = re.compile(rf"(?:(?<![\w)}}])-)?{_DIGITS}")  # a minus sign, but no subtraction and no hyphen
_REFERENCE = re.compile(rf"\$?-?{_DIGITS}%?")


def reference_number(answer: str | None) -> Decimal | None:
    """The value of a reference that is a plain number; None: it is something else."""
    text = "" if answer is None else answer.strip()
    return _value(text.strip("$%")) if _REFERENCE.fullmatch(text) else None


def last_number(response: str) -> Decimal | None:
    """The last number in a text; None: there is none."""
    found = _NUMBER.findall(response)
    return _value(found[-1]) if found else None


def _value(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))
