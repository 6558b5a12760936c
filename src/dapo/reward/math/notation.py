r"""One spelling for what is written in many ways: LaTeX, Unicode, markdown, separators, connectives, words.

Pure text in, text out; nothing is evaluated here. In the canonical spelling "or" and "and" are ``\lor`` and ``\land``.
"""
# ruff: noqa: RUF001 (look-alike characters are what this module is about)

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import partial

from dapo.reward.math.structure import is_balanced

_UNICODE = {
    "−": "-", "–": "-", "‐": "-", "‑": "-", "‒": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ",
    "∗": r"\cdot ", "•": r"\cdot ", "÷": "/", "⁄": "/", "∕": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ",
    "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ",
    "∪": r"\cup ", "∩": r"\cap ", "∖": r"\setminus ", "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "∨": r"\lor ", "∧": r"\land ", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]",
    "°": r"^\circ ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "ε": r"\epsilon ",
    "θ": r"\theta ", "λ": r"\lambda ", "μ": r"\mu ", "ρ": r"\rho ", "σ": r"\sigma ", "τ": r"\tau ", "φ": r"\phi ",
    "ω": r"\omega ", "Δ": r"\Delta ", "¢": r"\text{ cents}", "“": '"', "”": '"', "′": "'", "″": "''", "’": "'",
    "⟨": "(", "⟩": ")", "∣": "|", "…": r"\ldots ", "ⁿ": "^{n}", "≡": r"\equiv ", "∀": r"\forall ",
}  # fmt: skip
_FUNCTIONS = "arcsin|arccos|arctan|arctg|sinh|cosh|tanh|sin|cos|tan|tg|cot|ctg|sec|csc|ln|log|lg|exp"
_NUMBERS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "sixteen"]
_BASES = dict(zip(_NUMBERS, (*range(2, 13), 16), strict=True))
_COMMANDS = {
    name: spelling
    for names, spelling in [
        ("! left right middle big bigl bigr bigm Big Bigl Bigr Bigm bigg biggl biggr biggm Bigg Biggl Biggr Biggm", ""),
        (", ; : ( ) [ ] quad qquad limits checkmark displaystyle textstyle scriptstyle bf it rm sf tt bfseries itshape "
         "normalfont underline tiny small large Large LARGE huge Huge normalsize", " "),
        ("mathrm mathbf mathit mathsf mathtt textrm textbf textit textsf texttt textup textnormal mbox emph boldsymbol "
         "bm pmb", r"\text"),
        ("dfrac tfrac cfrac nicefrac sfrac", r"\frac"), ("dbinom tbinom", r"\binom"), ("Bbb", r"\mathbb"),
        ("lbrace", r"\{"), ("rbrace", r"\}"), ("lbrack", "["), ("rbrack", "]"), ("langle", "("), ("rangle", ")"),
        ("mid vert lvert rvert", "|"), ("cr", r"\\"), ("lt", "<"), ("gt", ">"), ("leq leqslant", r"\le "),
        ("geq geqslant", r"\ge "), ("neq", r"\ne "), ("simeq sim approxeq", r"\approx "), ("vee", r"\lor "),
        ("wedge", r"\land "), ("backslash", r"\setminus "), ("degree", r"^\circ "),
        ("nothing varnothing", r"\emptyset "), ("lg", r"\log "), ("tg", r"\tan "), ("ctg cotg", r"\cot "),
        ("arctg", r"\arctan "), ("cosec", r"\csc "),
    ]
    for name in names.split()
} | dict.fromkeys([" ", "\n", ""], " ")  # fmt: skip
"""Other names of what has one, by what stands behind the backslash; what only changes the looks is nothing."""
_FONT = "bf|it|rm|sf|tt"
_VECTOR = r"\\(?:vec|mathbf|boldsymbol|bm|overrightarrow)"
_BOLD = r"(?:\\(?:mathbf|boldsymbol|bm|pmb)\s*\{|\{\s*\\bf(?![A-Za-z]))\s*"
_PATTERNS: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"\\\\\s*\[[\d.]+\s*[a-z]+\]", r"\\\\"),  # a row of a matrix with more space after it
    (r"(?<=\d)(?:\s*\\!)*\s*(?:\{,\}(?:\s*\\!)*|,\s*\\!(?:\s*\\!)*)\s*(?=\d{3}(?!\d))", ""),  # 2,\! 500
    (r"\{([,:])\}", r"\1"),
    (r"[~`]|\\(?:[hv]space\*?|[hv]?phantom|(?:text)?color)\s*\{[^{}]*\}|\\[hv]?phantom\s*[^\s{]", " "),
    (r"\\(?:left|right)\s*\.", ""),
    (r"\\operatorname\*?\s*\{([A-Za-z]+)\}", r"\\\1 "),
    (rf"(?<![A-Za-z\\{{])(\\(?:text|mathrm|textrm)\s*\{{\s*)?({_FUNCTIONS}|(?:max|min|gcd|lcm)(?=[\s}}]*\\?[({{]))"
     r"(?![A-Za-z])(?(1)\s*\})(?=\s*(?:[(^_\d]|\\(?!approx|cdot|times|text)|[a-z](?![A-Za-z])))", r"\\\2 "),
    (rf"{_VECTOR}\s*\{{\s*([a-z])\s*\}}|\\hat\s*\{{\s*\\?([ijk])(?:math)?\s*\}}", r"\\vec{\1\2}"),
    (r"^\s*\\vec\{([a-hj-z])\}\s*$|\\mathrm\s*\{\s*([eid])\s*\}", r"\1\2"),
    (rf"(?<![A-Za-z}}\]^_])\{{\s*\\(?:{_FONT})(?![A-Za-z])([^{{}}]*)\}}", r"\\text{\1}"),
    (rf"\\(?:{_FONT})\s*\{{", r"\\text{"),
    (r"\\([A-Za-z]+|[^A-Za-z]|$)", lambda m: _COMMANDS.get(m[1], m[0])),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),  # behind a doubled backslash
    (r"\\text(?=\s*\{\s*\\[a-z])", ""),  # mathematics, all of it in bold
    (r"\\(max|min|gcd|lcm)\s*\\\{((?:[^{}]|\{[^{}]*\})*?)\\\}", r"\\\1(\2)"),
    (r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
    (r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
    (r"\\frac\s*(\\pi|[A-Za-z\d])\s*(\\pi|[A-Za-z\d])", r"\\frac{\1}{\2}"),
    (r"\\frac\s*(\\pi|[A-Za-z\d])\s*\{", r"\\frac{\1}{"),
    (r"\\frac\s*\{\s*\\text\s*\{([^{}]*)\}\s*\}\s*\{\s*\\text\s*\{([^{}]*)\}\s*\}", r"\\text{\1/\2}"),
    (r"^\s*(?:\\text\s*\{\s*)?(?:[A-Za-z][A-Za-z ]{2,}:|(?i:(?:the )?(?:final )?answer is))(?:\s*\})?", ""),
    (r"(?:\\text\s*\{)?(?<![A-Za-z\\])(?:approximately|approx\.?|about)(?![A-Za-z])(?:\s*\})?", r"\\approx "),
    (r"\\text\s*\{\s*(-?[\d.,]+)\s+([A-Za-z][A-Za-z ]*)\}", r"\1 \\text{\2}"),
    (r"\\text\s*\{([^A-Za-z{}]*|\d[\dA-Za-z]*(?=\}\s*_)[^{}]*)\}", r" \1 "),  # no words: numbers set upright
    (r"\((\d[\dA-Za-z]*)\)\s*(?=_)", r"\1"),
    (rf"_\s*\{{?\s*(?:\\text\s*\{{)?\s*({'|'.join(_BASES)})(?![A-Za-z])[\s}}]*", lambda m: f"_{{{_BASES[m[1]]}}}"),
    (r"(?<![A-Za-z\d])(\d[\dA-F]*+)\s*(?:\\text\s*\{)?\s*\(?\s*base[\s}]*(\d+)[\s)}]*", r"\1_{\2}"),
    (r"(?<![A-Za-z])C\(\s*(\d+)\s*,\s*(\d+)\s*\)", r"\\binom{\1}{\2}"),
    (r"(?:\{\})?[_^]\{?(\d+)\}?\s*C_\{?(\d+)\}?", r"\\binom{\1}{\2}"),
    (r"\\(?:mathbb|Bbb)\s*\{?\s*([A-Z])\s*\}?|\\([RZNQ])(?![A-Za-z])", r"\\mathbb{\1\2}"),
    (r"\(-\s*\\infty\s*,\s*\+?\s*\\infty\s*\)", r"\\mathbb{R}"),
    (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
    (r"√\s*(\d+|[A-Za-z])", r"\\sqrt{\1}"),
    (r"√\s*(?=\{)", r"\\sqrt"),
    (r"(?:√|(?<![A-Za-z\\])sqrt|\\sqrt)\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(\\sqrt\[\d\])\s*(\d+|[A-Za-z])", r"\1{\2}"),
    (r"\\log\s*_\s*\{?\s*e\s*\}?", r"\\ln "),
    (r"\^\s*\(([^()]*)\)", r"^{\1}"),
    (r"\*\*", "^"),
    (r"\^\s*(-?\d+(?:\.\d+)?)", r"^{\1}"),
    (r"\^\s*([A-Za-z])", r"^{\1}"),
    (r"\*", r" \\cdot "),
    (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r" \\times "),
    (r"\\(?:bar|dot|overline)\s*(?:\{(\d+)\}|(\d))", r"\\overline{\1\2}"),
    (r"\\overline\{(\d)\}(\d*)\\overline\{(\d)\}", r"\\overline{\1\2\3}"),
    (r"(?<![\w.])(\d*\.\d*)\((\d+)\)", r"\1\\overline{\2}"),  # 0.1(6)
    (r"[<>!]=", lambda m: {"<=": r"\le ", ">=": r"\ge ", "!=": r"\ne "}[m[0]]),
    (r"\(\s*\\approx([^()]*)\)\s*$", r"\\approx \1"),
    (r"\^\s*\{?\s*(?:\\prime\s*)+\}?", lambda m: "'" * m[0].count("p")),
    (r"\\text\s*\{\s*([\dA-Fa-f]{2,})\s*\}(?=\s*_)", r"\1"),
    (r"[\^_]\s*\{\s*\}", ""),
    (r"(?:\\\\\s*)+$", ""),
    (r"(?<=[)\]}])\s*U\s*(?=[(\[\\])", r" \\cup "),
    (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
    (r"(?<![A-Za-z\\])infinity(?![A-Za-z])", r"\\infty "),
    (r"(?:\{\})?\^\s*\{\s*\\circ\s*\}", r"^\\circ"),
    (r"(\d+) *\^\\circ *([\d.]+) *'(?: *([\d.]+) *(?:''|\"|$))?",  # degrees, minutes, seconds
     r"(\1+\\frac{\2}{60}+\\frac{0\3}{3600})^\\circ"),
    (r"(^|\\(?:cup|cap|setminus|in)(?![A-Za-z])|=)\s*\](?=[^\][]+[,;])", r"\1("),  # ]0, 1[
    (r"([,;][^\][,;]+)\[(?=\s*(?:$|\\(?:cup|cap|setminus)(?![A-Za-z])))", r"\1)"),
    (r"(?<=\\mathbb\{[A-Z]\})\s*-\s*(?=\\?[\[({])|(?<=[\])])\s*-\s*(?=\\\{)", r"\\setminus "),
    (r"\\setminus\s*\{([^{}]*)\}", r"\\setminus \\{\1\\}"),
]  # fmt: skip
_SPELLINGS = [(re.compile(pattern), replacement) for pattern, replacement in _PATTERNS]
_MULTIPLIERS = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_MULTIPLIED = re.compile(
    rf"(?<=[\d}}])\s*(?:(?P<open>\\text\s*\{{)\s*)?(?P<word>{'|'.join(_MULTIPLIERS)})(?![A-Za-z])\s*(?P<close>\}})?",
    re.IGNORECASE,
)
_MODULUS = re.compile(
    r"((?:\\text\s*\{\s*)?(?:\(\s*)?(?:\\text\s*\{\s*)?\\?(?<![A-Za-z])[pb]?mod(?:ulo)?(?![A-Za-z])[\s}{]*)"
    r"((?:\\pi|\w)\w*(?:\^\s*\{?\w+\}?)?)(?:\s*[)}])*"
)
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_CONNECTIVES = [
    (re.compile(rf"\\text\s*\{{\s*,?\s*{word}\s*,?\s*\}}|(?<![A-Za-z\\{{]){word}(?![A-Za-z}}])"), rf" \\{token} ")
    for word, token in (("and", "land"), ("or", "lor"))
]
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\d)|(?<![\d.,])\d{1,3}(?: \d{3})+(?! ?[\d/])")


def canonical(text: str, reference: str = "") -> str:
    """``text`` in the one spelling that the rest of the reward code reads. Bold letters of an answer are vectors or
    sets of numbers where its canonical ``reference`` has such, else just letters."""
    text = _plain_characters(text.strip().strip('*"').strip())
    if r"\mathbb" in reference:
        text = re.sub(rf"{_BOLD}([RZNQC])\s*\}}", r"\\mathbb{\1}", text)
    if reference and not re.search(r"\\(?:vec|overrightarrow)", reference):
        text = re.sub(rf"{_BOLD}([a-z])\s*\}}", r" \1", text)
    text = _without_dollars(text)
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    text = _multiplied(_MODULUS.sub(partial(_modulus, r"\equiv" in text), text))
    for pattern, replacement in _CONNECTIVES:
        text = pattern.sub(replacement, text)
    text = re.sub(r"\s+", " ", text).strip().strip('"').removeprefix("=").lstrip()
    text = re.sub(r",(?: ?,)+", ",", text)
    text = re.sub(r"[,;] ?(?=\\l(?:and|or)(?![A-Za-z]))", "", text)  # "12, 35, and 71"
    if not re.search(r"[(\[]|\\\{", text):  # within brackets a comma separates
        text = _GROUPED.sub(lambda m: re.sub(r"[ ,]", "", m[0]), text)
    text = text[:-1].rstrip() if text.endswith((".", ",", ";")) and not text.endswith("\\,") else text
    return _without_braces(text)


def _modulus(is_congruence: bool, match: re.Match[str]) -> str:
    r"""``(mod 5)`` as ``\pmod{5}``; in ``17 \bmod 5`` it is an operation."""
    if not is_congruence and "(" not in match[1] and "pmod" not in match[1]:
        return match[0]
    return rf" \pmod{{{match[2]}}}"


def _multiplied(text: str) -> str:
    r"""``5\text{ million dollars}`` as ``5 \cdot 1000000 \text{dollars}``."""

    def product(match: re.Match[str]) -> str:
        rest = r"\text{" if match["open"] and not match["close"] else ""
        brace = match["close"] if match["close"] and not match["open"] else ""
        return rf" \cdot {_MULTIPLIERS[match['word'].lower()]} {rest}{brace}"

    for _ in range(3):  # "2 hundred thousand million"
        text = _MULTIPLIED.sub(product, text)
    return text


def squeezed(text: str) -> str:
    """Without white space, except where it parts two numbers."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def _plain_characters(text: str) -> str:
    if text.isascii():
        return text
    pieces = []
    for char in text:
        if char in _UNICODE:
            pieces.append(_UNICODE[char])
        elif "VULGAR FRACTION" in unicodedata.name(char, ""):
            top, _, bottom = unicodedata.normalize("NFKC", char).partition("⁄")
            pieces.append(rf"\frac{{{top}}}{{{bottom}}}")
        else:
            pieces.append(char)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", r"^{\g<0>}", "".join(pieces))
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", r"_{\g<0>}", text)
    return unicodedata.normalize("NFKC", text).replace("−", "-")


def _without_dollars(text: str) -> str:
    """Math delimiters go, money stays (as an escaped dollar)."""
    are_pairs = len(re.findall(r"(?<!\\)\$", text)) % 2 == 0
    return re.sub(r"(?<!\\)\$", " " if are_pairs else r"\\$", text)


def _without_braces(text: str) -> str:
    """``{12}`` as ``12``: braces around the whole text are TeX's own and mean nothing."""
    while text.startswith("{") and text.endswith("}") and is_balanced(text[1:-1]):
        text = text[1:-1].strip()
    return text


# --- text answers -------------------------------------------------------------------------------------------------

_MATH_WORDS = re.compile(
    r"\\(?:begin|end)\s*\{[A-Za-z]+\}|\\[A-Za-z]+|_\s*\{?\s*(?:\\text\s*\{)?[A-Za-z]+(?:\s*\})*"
    rf"|(?<![A-Za-z])(?:{_FUNCTIONS}|max|min|gcd|lcm|mod)"
)
_WORD = re.compile(r"[^\W\d_]{3,}|(?<![A-Za-z])(?:no|No|NO)(?![A-Za-z])")
_CHOICE = re.compile(r"(?:(?:the )?(?:answer|option|choice)\s*(?:is\s*)?:?\s*)?\(?([A-Za-z])[).]?", re.IGNORECASE)
_MARKED_CHOICE = re.compile(
    r"\\text\s*\{\s*\(?[A-Za-z][).]?\s*\}|\\text\s*\{\s*\([A-Za-z]\)\s*\}\s*\S.*|\([A-Za-z]\)|[A-Za-z]\)"
)
_OTHER_CHOICE = re.compile(
    r"(?<![A-Za-z])(?:[A-J](?![A-Za-z])|[a-j][).](?![A-Za-z]))|(?:,|\\l(?:or|and)|(?<![A-Za-z])(?:or|and))\s*\(?[A-Ja-j](?![A-Za-z])"
)
_LETTER = r"(?:\(\s*[A-Ja-j]\s*\)|[A-Ja-j])"
_SEVERAL = re.compile(rf"{_LETTER}(?:\s*(?:[,;、]|\\?&|\\land(?![A-Za-z]))?\s*{_LETTER})+")
_RUN = re.compile(r"[A-Ja-j](?:\s*[A-Ja-j])+")
_PAIR = re.compile(r"""\s*[(\[](?![A-J\s]+\W\s*$)[^()\[\]"']*[)\]]\s*""")
_ANNOUNCED = re.compile(
    r"(?:the |correct |right )*(?:answer|option|choice|statement)s?(?: are| is)?\s*:?", re.IGNORECASE
)
_LIST = re.compile(r"[,;]|\\l(?:and|or)(?![A-Za-z])")


def is_text(text: str) -> bool:
    """Whether a canonical text is words, not mathematics: a run of three letters that is no known function, or letters
    that are set as text."""
    return bool(_WORD.search(_MATH_WORDS.sub(" ", text)) or re.search(r"\\text\s*\{[^{}]*[A-Za-z]", text))


def is_marked_choice(text: str) -> bool:
    r"""A letter that is set as a choice: ``\text{C}``, ``(C)``, ``C)``, ``\text{(C)} 12``."""
    return bool(_MARKED_CHOICE.fullmatch(text))


def same_text(gold: str, answer: str) -> bool:
    """Whether two canonical texts say the same: without case, white space and mark-up; lists in any order."""
    left, right = sorted(_items(gold)), sorted(_items(answer))
    return left == right and all(left)


def same_choice(gold: str, answer: str) -> bool:
    """Whether an answer marks the letter that the reference, a capital from A to J, is: ``c``, ``C. 12``."""
    letter = _TEXT.sub(r"\1", gold).strip(" ().")
    if not re.fullmatch("[A-J]", letter):
        return False
    text = _TEXT.sub(r" \1 ", answer).strip()
    marked = re.match(r"\(?([A-Ja-j])[).:]|([A-Ea-e])$", text)
    if marked is None or (marked[1] or marked[2]).upper() != letter:
        return False
    return not _OTHER_CHOICE.search(text[marked.end() :])


def same_choices(gold: str, answer: str) -> bool | None:
    """Whether an answer names the choices that a reference does, two or more: "A, D" or "(D) and (A)" those of "AD".
    None: one of them names none.

    A reference in capitals that run together may be a word, a product or an order, too: it meets the same run, and
    lists if it is in alphabetical order. One in one pair of brackets is an ordered pair.
    """
    named, given = _choices(gold), _choices(answer)
    is_run = bool(_RUN.fullmatch(named)) and named.isupper()
    if is_run and _RUN.fullmatch(given):
        return named.replace(" ", "") == given.replace(" ", "")
    letters, others = (re.findall("[A-J]", text.replace(r"\land", "").upper()) for text in (named, given))
    is_list = _SEVERAL.fullmatch(named) and (named.replace(r"\land", "").isupper() or named.count("(") == len(letters))
    if _PAIR.fullmatch(_TEXT.sub(r"\1", gold)) or not is_list or not _SEVERAL.fullmatch(given):
        return None
    is_doubtful = len(set(letters)) < len(letters) or (is_run and letters != sorted(letters))
    return None if is_doubtful else set(letters) == set(others)


def _choices(text: str) -> str:
    text = re.sub(r"""\\?[{}]|["'\[\]]""", " ", _TEXT.sub(r" \1 ", text)).strip()
    text = _ANNOUNCED.sub("", text, count=1).strip() if _ANNOUNCED.match(text) else text
    return text[1:-1].strip() if text.startswith("(") and text.endswith(")") and text.count("(") == 1 else text


def _items(text: str) -> list[str]:
    return [_plain(item) for item in _LIST.split(_TEXT.sub(r" \1 ", text))]


def _plain(item: str) -> str:
    item = item.strip()
    choice = _CHOICE.fullmatch(item) or re.fullmatch(r"\(([A-Za-z])\)\s*\S.*", item)
    if choice is not None:
        return choice[1].casefold()
    return re.sub(r"[\s{}\\\"']+", "", item).casefold().rstrip(".")
