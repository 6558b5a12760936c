r"""LaTeX whose backslashes were eaten: in JSON, YAML or Python a text such as "\boxed" is a backspace and "oxed".

Pure functions on text: consumes values of rows and of the config, produces words for people.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_ALWAYS = "\x00-\x08\x0b\x0c\x0e-\x1f\x7f"
"""Control characters other than tab and line ends, which a text that a model reads never needs."""
_LETTERS = dict(zip("\a\b\t\n\v\f\r\x1b\u2028\u2029", "abtnvfreLP", strict=True))
"""What stands behind the backslash of each escape. Those of YAML alone are among them."""
_REST = {
    "\t": r"(?:ext(?:bf|it|rm|tt|sf|normal)?|frac|extstyle|ilde|anh?|binom|ag)[ ]?(?:[{(\\]|\t(?:heta|au))"
    r"|(?:frac|binom)\d\d|(?:heta|imes|herefore|riangle(?:left|right|down|q)?(?:eq)?|au|anh|hicksim|hickapprox)(?![a-z])",
    "\n": r"(?:abla|otin|leq|geq|subseteq|leftarrow|rightarrow)(?![a-z])",
    "\r": r"(?:ho|ight|angle|ceil|floor|ightarrow|ule|vert|brace|brack)(?![a-z])|(?:m|ef)\{",
    "\u2028": r"(?:ambda|eftarrow|ongrightarrow)(?![a-z])",
    "\u2029": r"(?:i|hi|si|r)(?![a-z])",
}
"""How the command goes on, of escapes that text has for other reasons too."""
_LINES = "(?:eq|e|u|ot|eg|mid|orm|exists|parallel|less|gtr|prec|succ|sim|cong)(?![a-z])"
_SHORT = r"\t(?=(?:op|o|an|ext|ilde|frac|binom|ag)(?![a-z]))|\r(?=m\s+\w)"
"""Commands whose rest is a word or a name: they count where a formula begins, and in answers."""
_EATEN = re.compile(
    "|".join((f"[{_ALWAYS}]", *(f"{char}(?=(?:{rest}))" for char, rest in _REST.items())))
    + rf"|(?<=[${{(])(?:{_SHORT})|(?<=\S )\t(?=o [\w$\\])"
)
_IN_A_FORMULA = re.compile(rf"\$|\n(?={_LINES}[^$\n]{{0,200}}\$)")
"""Of these, a line may well begin with a variable `eq` or `u`: they count between two dollars only."""
_IN_AN_ANSWER = re.compile(rf"\n(?={_LINES}|i(?![a-z]))|{_SHORT}")  # an answer is a formula, and seldom has lines


def eaten(text: str, is_answer: bool = False) -> str | None:
    """What a text holds that was not meant, and what probably was; None: nothing of the kind."""
    found = _EATEN.search(text) or (_IN_AN_ANSWER.search(text) if is_answer else None)
    dollars = 0
    for mark in _IN_A_FORMULA.finditer(text) if found is None else ():
        dollars += mark[0] == "$"
        if mark[0] == "\n" and dollars % 2:
            found = mark
            break
    if found is None:
        return None
    char, rest = found[0], re.match(r"[A-Za-z]*", text[found.end() : found.end() + 20])
    held = f"holds the control character {char!a}"
    if char not in _LETTERS or not rest or not rest[0]:
        return held
    return f"{held} where \\{_LETTERS[char]}{rest[0]} was probably meant (in quotes, a backslash is written twice)"


def restored(text: str) -> str:
    return _EATEN.sub(lambda found: f"\\{_LETTERS[found[0]]}" if found[0] in _LETTERS else "", text)


def texts_in(value: object, key: str) -> Iterator[tuple[str, str]]:
    """Every text within a value, with its key, as in ``data.stop[0]``."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from texts_in(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from texts_in(item, f"{key}[{place}]")


def eaten_in(value: object, key: str = "", is_answer: bool = False) -> list[str]:
    """What :func:`eaten` says of each text within a value, with its key."""
    return [f"{name} {said}" for name, text in texts_in(value, key) if (said := eaten(text, is_answer))]
