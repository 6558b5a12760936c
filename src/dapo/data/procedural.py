"""Rows that a program makes: ``reasoning_gym:TASK?size=5000&seed=1&...``, or a function of the user's,
``file.py:function?size=...``, called as ``function(index, seed, **options)``.

Consumes a path of ``data.train`` or ``evaluation.data``; produces a table whose rows follow from the seed and their
number alone. So mixtures, difficulty and resume work as for files: the position is the index."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from dapo.data.cache import key_of
from dapo.data.rows import BadRow, Table
from dapo.errors import DataError, extra, first_line
from dapo.util.files import file_hash, json_or_text
from dapo.util.user_code import load_named

_PATH = re.compile(r"(?P<module>reasoning_gym|.+\.py):(?P<name>\w+)(?:\?(?P<options>.*))?")
_SIZE = 100_000


class ProceduralRows(Table):
    def __init__(self, name: str, rows: int, content: str, make: Callable[[int], Mapping[str, Any]]) -> None:
        super().__init__(name, rows, content)
        self._make = make

    def raw(self, number: int) -> Any:
        try:
            return self._make(number)
        except Exception as error:  # of the program's own
            raise BadRow(f"it cannot be made: {type(error).__name__}: {first_line(error)}") from None


def open_procedural(path: str) -> ProceduralRows | None:
    """None: ``path`` names something else. Raises DataError: there is no such task or function."""
    if (found := _PATH.fullmatch(path)) is None:
        return None
    options: dict[str, Any] = {key: json_or_text(text) for key, text in parse_qsl(found["options"] or "")}
    size, seed = options.pop("size", _SIZE), options.pop("seed", 0)
    if not isinstance(size, int) or size < 1:
        raise DataError(f"{path}: size must be a whole number above 0")
    if found["module"] == "reasoning_gym":
        task, told = _task(path, found["name"], size, seed, options), version("reasoning-gym")
        return ProceduralRows(path, size, key_of(path, told), lambda number: _row(task[number]))
    make = partial(load_named(f"{found['module']}:{found['name']}", path, DataError), seed=seed, **options)
    return ProceduralRows(path, size, key_of(path, file_hash(Path(found["module"]))), make)


def _task(path: str, name: str, size: int, seed: int, options: Mapping[str, Any]) -> Any:
    with extra("procedural", path, DataError):
        import reasoning_gym
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **options)
    except (ValueError, TypeError, AssertionError) as error:
        raise DataError(f"{path}: {first_line(error)}") from None


def _row(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"prompt": entry["question"], "answer": entry["answer"] or "", "metadata": entry["metadata"]}


def final_answer(response: str) -> str:
    """What stands behind the last "Answer:", however many lines; the last line, if there is none."""
    _, mark, said = response.rpartition("Answer:")
    return (said if mark else response.strip().rpartition("\n")[2]).strip()


@cache
def _scorer(task: str) -> Callable[..., float]:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(task)  # type: ignore[no-any-return]


def score(prompt: str, response: str, answer: str | None, **meta: Any) -> bool:
    """What a task's own check says, which knows all right answers (``reward.function: dapo.data.procedural:score``)."""
    entry = {"question": prompt, "answer": answer, "metadata": meta["metadata"]}
    return bool(_scorer(meta["metadata"]["source_dataset"])(answer=final_answer(response), entry=entry) >= 1)
