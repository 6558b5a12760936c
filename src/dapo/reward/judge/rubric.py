"""The message to a judge, made from a Jinja template, and the grade in the judge's reply. The response is a value in
the template: it is never parsed, neither for a grade nor for braces."""

from __future__ import annotations

import hashlib
import re
from importlib import resources
from pathlib import Path
from typing import Any

from dapo.errors import RewardError
from dapo.records import FinishReason, Prompt
from dapo.reward.contract import fields

_GRADE = re.compile(r"(?:#+ *)?[*_`]*Grade[*_`]*:[*_` ]*(-?[0-9]+(?:\.[0-9]+)?)[*_`]*")
"""The last line of a reply, or a part of it, may be in bold, or a heading."""


class RubricError(Exception):
    """The template cannot be filled for this row."""


class Rubric:
    """A template over ``prompt``, ``response``, ``answer``, ``meta``, ``scale``, ``fence``, ``prompt_end`` and
    ``finish_reason`` (empty: not known). ``file``: None: the built-in one. ``scale``: lowest and highest grade.

    ``fence`` is a line with the hash of prompt and response: a response cannot hold it, and the same question is the
    same in every run, as a cache needs.
    Raises RewardError: the file cannot be read, or is no template."""

    def __init__(self, file: str | None, scale: tuple[float, float]) -> None:
        from jinja2 import StrictUndefined, TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self._scale = scale
        environment = ImmutableSandboxedEnvironment(
            undefined=StrictUndefined, finalize=_printable, trim_blocks=True, lstrip_blocks=True
        )
        try:
            self._template = environment.from_string(_read(file))
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            raise RewardError(f"reward.rubric: {file}{f', line {line}' if line else ''}: {error}") from None

    def message(self, prompt: Prompt, response: str, finish_reason: FinishReason | None = None) -> str:
        """Raises RubricError: the template needs a key that this row has not, or prints a value that is null."""
        digest = hashlib.sha256(f"{len(prompt.text)} {prompt.text}{response}".encode("utf-8", "surrogatepass"))
        values = {
            **fields(prompt, response, finish_reason),
            "finish_reason": finish_reason or "",
            "scale": [int(end) if end.is_integer() else end for end in self._scale],
            "fence": f"-----{digest.hexdigest()[:32]}-----",
        }
        try:
            return self._template.render(values)
        except Exception as error:  # filters and arithmetic of a template raise all kinds
            raise RubricError(f"the rubric cannot be filled for row {prompt.row + 1}: {error}") from None

    def grade(self, reply: str) -> float | None:
        """N of the last line, ``Grade: N``, if it is on the scale."""
        found = _GRADE.fullmatch(reply.rstrip().rpartition("\n")[2].strip())
        low, high = self._scale
        return grade if found and low <= (grade := float(found[1])) <= high else None


def _printable(value: Any) -> Any:
    if value is None:
        raise ValueError("it prints a value that is null here; ask with {% if ... is not none %}")
    return value


def _read(file: str | None) -> str:
    if file is None:
        return resources.files("dapo.reward.judge").joinpath("rubric.jinja").read_text(encoding="utf-8")
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise RewardError(f"reward.rubric: cannot read {file!r}: {error.strerror or error}") from None
    except ValueError:
        raise RewardError(f"reward.rubric: {file!r} is not a text file in UTF-8") from None
