r"""Other ways to write an answer, and answers that are nearly right: made from LaTeX references of the MATH kind.

Independent of the code under test. The reader in ``latex_reader.py`` checks the generator: a rewrite must have the
value of the reference, a near miss must not.
"""

import random
import re
from fractions import Fraction

from latex_reader import equal, same_value, value

# --- rewrites -----------------------------------------------------------------------------------------------------


def cut_top(text, separators):
    """Cut at characters outside of brackets; each piece keeps what it was cut at in front of it."""
    pieces, depth, start = [], 0, 0
    for place, char in enumerate(text):
        depth += (char in "({[") - (char in ")}]")
        if depth == 0 and char in separators and place > start:
            pieces.append(text[start:place])
            start = place
    return [*pieces, text[start:]]


def looks(text):
    """Other looks of the same text, valid for any LaTeX expression."""
    yield f"${text}$"
    yield rf"\displaystyle {text}"
    yield rf"\({text}\)"
    yield f"{text}."
    yield text.replace("+", " + ").replace("-", " - ").replace("=", " = ")
    if r"\frac" in text:
        yield text.replace(r"\frac", r"\dfrac")
        yield text.replace(r"\frac", r"\tfrac")
    if r"\left" in text:
        yield text.replace(r"\left", "").replace(r"\right", "")
    elif "(" in text and text.count("(") == text.count(")"):
        yield text.replace("(", r"\left(").replace(")", r"\right)")
    if re.search(r"\^\d(?!\d)", text):
        yield re.sub(r"\^(\d)(?!\d)", r"^{\1}", text)
    if re.search(r"\\sqrt\{\d\}", text):
        yield re.sub(r"\\sqrt\{(\d)\}", r"\\sqrt\1 ", text)


def number_rewrites(number: Fraction):
    top, bottom = number.numerator, number.denominator
    sign = "-" if top < 0 else ""
    yield rf"{sign}\frac{{{3 * abs(top)}}}{{{3 * bottom}}}"
    if bottom == 1:
        yield f"{top}.0"
        yield f"{top - 1}+1"
        yield f"{top}.00"
        yield rf"{sign}\frac{{{abs(top) * 7}}}{{7}}"
        if abs(top) >= 1000:
            yield f"{top:,}"
            yield f"{top:,}".replace(",", "{,}")
            yield f"{top:,}".replace(",", r"\,")
            yield f"{top:,}".replace(",", r",\!")
        if top > 0 and top % 1000 == 0:
            yield rf"{top // 1000} \times 10^3"
            yield rf"{top // 1000}e3"
        return
    yield f"{top}/{bottom}"
    yield rf"\frac{{{-top}}}{{{-bottom}}}"
    yield rf"{sign}{abs(top)} \cdot \frac{{1}}{{{bottom}}}"
    yield rf"\frac{{{top}}}{{{bottom}}}"
    yield rf"{sign}\frac{{1}}{{{bottom}}} \cdot {abs(top)}"
    if abs(top) > bottom:
        yield rf"{sign}{abs(top) // bottom}\frac{{{abs(top) % bottom}}}{{{bottom}}}"
        yield f"{sign}{abs(top) // bottom} {abs(top) % bottom}/{bottom}"
    decimal = exact_decimal(number)
    if decimal is not None:
        yield decimal
        yield decimal + "0"


def exact_decimal(number: Fraction):
    for places in range(1, 9):
        scaled = number * 10**places
        if scaled.denominator == 1:
            digits = str(abs(scaled.numerator)).rjust(places + 1, "0")
            return f"{'-' if number < 0 else ''}{digits[:-places]}.{digits[-places:]}"
    return None


def expression_rewrites(text):
    """Of an expression that ``value`` can read."""
    terms = cut_top(text, "+-")
    if len(terms) > 1:
        signed = [term if term[0] in "+-" else "+" + term for term in terms]
        yield "".join(reversed(signed)).removeprefix("+")
        yield "".join(signed[1:] + signed[:1]).removeprefix("+")
    yield f"({text})+1-1"
    yield rf"2({text}) - ({text})"
    yield rf"\frac{{2({text})}}{{2}}"
    yield rf"0.5 \cdot 2 \cdot ({text})"
    if re.search(r"\d\\(?:sqrt|pi)", text):
        yield re.sub(r"(\d)(\\(?:sqrt|pi))", r"\1 \\cdot \2", text)
    match = re.fullmatch(r"(\d+)\s*\\sqrt\{(\d+)\}", text)
    if match:
        yield rf"\sqrt{{{int(match[1]) ** 2 * int(match[2])}}}"
        yield rf"\sqrt{{{match[2]}}} \cdot {match[1]}"


# --- near misses --------------------------------------------------------------------------------------------------


def text_misses(text):
    """One change each: a number one larger, another digit, a sign, two parts swapped."""
    for match in re.finditer(r"\d+", text):
        before, number, after = text[: match.start()], match[0], text[match.end() :]
        yield f"{before}{int(number) + 1}{after}"
        yield f"{before}{int(number) + 10 ** (len(number) - 1)}{after}"
        if len(number) > 1 and number != number[::-1] and number[-1] != "0":
            yield f"{before}{number[::-1]}{after}"
        yield f"{before}{number}0{after}"
    for match in re.finditer(r"[+-]", text):
        other = "-" if match[0] == "+" else "+"
        yield text[: match.start()] + other + text[match.end() :]
    yield f"-({text})"
    yield f"{text}+1"
    yield rf"2 \cdot ({text})"
    swapped = re.sub(r"\\([dt]?frac)\{([^{}]*)\}\{([^{}]*)\}", r"\\\1{\3}{\2}", text)
    if swapped != text:
        yield swapped


# --- kinds of references ------------------------------------------------------------------------------------------


def kinds(gold, rng):
    """Rewrites and near misses of a reference, or None if it is of no kind that is known here."""
    makers = (of_number, of_separated, of_decorated, of_text, of_matrix, of_bracketed, of_list, of_expression)
    for make in makers:
        made = make(gold.rstrip("."), rng)
        if made is not None:
            rewrites, misses = (list(dict.fromkeys(side)) for side in made)
            return [r for r in rewrites if r != gold], misses
    return None


def as_fraction(text):
    match = re.fullmatch(r"(-?)\s*(?:(\d+(?:\.\d+)?)|\\[dt]?frac\{(\d+)\}\{(\d+)\}|\\[dt]?frac(\d)(\d))", text)
    if match is None:
        return None
    sign, plain, *parts = match.groups()
    top, bottom = [part for part in parts if part] or (plain, 1)
    number = Fraction(top) / Fraction(bottom)
    return -number if sign else number


def of_number(gold, rng):
    number = as_fraction(gold)
    if number is None:
        return None
    rewrites = [*number_rewrites(number), *looks(gold), f"x = {gold}", rf"{gold} \text{{ }}"]
    near = {number + 1, number - 1, -number, number * 10, number / 10, number + Fraction(1, 1000), number * 2}
    near |= {1 / number} if number else set()
    near -= {number}
    misses = [rng.choice(list(number_rewrites(other))) for other in sorted(near)]
    return rewrites, [
        *misses,
        f"{gold}, 98765432",
        f"{gold}x+1",
        rf"{gold} \text{{ or }} 98765432",
        f"98765432, {gold}",
    ]


def of_separated(gold, rng):
    if not re.fullmatch(r"\d{1,3}(?:,(?:\s?\\!\s?)?\d{3})+", gold):
        return None
    return of_number(re.sub(r"\D", "", gold), rng)


def of_decorated(gold, rng):
    """Degrees, percent, money and units."""
    for pattern, others, wrong in (
        (
            r"(?P<n>.+?)\s*\^\{?\\circ\}?",
            [r"{}^{{\circ}}", r"{}°", r"{} \text{{ degrees}}", "{} degrees", r"{}^\circ"],
            [r"{}\%"],
        ),
        (
            r"(?P<n>.+?)\s*\\%",
            [r"{}\%", "{}%", r"{} \text{{ percent}}", "{} percent", r"\frac{{{}}}{{100}}"],
            [r"{}^\circ"],
        ),
        (r"\\\$\s*(?P<n>.+)", [r"\${}", "${}", r"\$ {}", "{} dollars", r"{} \text{{ dollars}}"], ["{} euros", r"{}\%"]),
        (
            r"(?P<n>.+?)\s*\\(?:text|mbox)\{\s*(?P<unit>(?!units?\b)[a-z]{2,})\s*\}",
            [r"{} \text{{ UNIT}}", r"{}\text{{UNIT}}", r"{}~\mathrm{{UNIT}}", r"{}\,\mathrm{{UNIT}}", "{} UNIT"],
            [r"{} \text{{ UNITx}}", r"{} \text{{ UNIT}}^2", r"{}\%"],
        ),
    ):
        match = re.fullmatch(pattern, gold)
        number = as_fraction(re.sub(r",\\!|,", "", match["n"])) if match else None
        if match is None or number is None:
            continue
        unit = match.groupdict().get("unit") or ""
        fill = [other.replace("UNIT", unit) for other in others]
        plain = re.sub(r",\\!|,", "", match["n"])
        rewrites = [form.format(plain) for form in fill]
        near = [n for n in (number + 1, -number, number * 10, number / 10, number + Fraction(1, 4)) if n != number]
        misses = [rng.choice(fill[:3]).format(exact_decimal(n) or str(n)) for n in near]
        return rewrites, misses + [form.replace("UNIT", unit).format(plain) for form in wrong]
    return None


def of_text(gold, rng):
    match = re.fullmatch(r"\\text\{\s*\(?([A-Za-z][A-Za-z ]*)\)?\s*\}", gold)
    if match is None:
        return None
    word = match[1]
    rewrites = [
        word,
        rf"\textbf{{{word}}}",
        rf"\mathrm{{{word}}}",
        rf"\text{{ {word} }}",
        f"{word}.",
        rf"\text{{{word}}}.",
    ]
    if len(word) > 1:
        return [*rewrites, word.lower(), word.upper()], [
            f"{word}x", word[:-1], word[1:], f"not {word}", f"{word} or another", "5", rf"\text{{x{word}}}",
        ]  # fmt: skip
    others = [letter for letter in "ABCDE" if letter != word]
    return [*rewrites, rf"\text{{({word})}}", f"({word})"], [
        *others, *(rf"\text{{({letter})}}" for letter in others), rf"{word}, {others[0]}",
    ]  # fmt: skip


def of_matrix(gold, rng):
    match = re.fullmatch(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", gold)
    rows = [[cell.strip() for cell in row.split("&")] for row in match[1].split(r"\\")] if match else []
    if not match or any(value(cell) is None for row in rows for cell in row):
        return None

    def written(rows, kind="pmatrix", gap=" "):
        body = rf"{gap}\\{gap}".join(f"{gap}&{gap}".join(row) for row in rows)
        return rf"\begin{{{kind}}}{gap}{body}{gap}\end{{{kind}}}"

    rewrites = [written(rows, "bmatrix"), written(rows, gap=""), f"${written(rows)}$", f"A = {written(rows)}"]
    rewrites += [written([[next(expression_rewrites(cell)) for cell in row] for row in rows])]
    rewrites += [written(rows, gap="").replace(r"\frac", r"\dfrac"), written(rows, "bmatrix", "  ")]
    misses = []
    for y, row in enumerate(rows):
        for x, cell in enumerate(row):
            for other in (f"{cell}+1", f"-({cell})", f"2({cell})"):
                if not equal(value(other), value(cell)):
                    misses.append(written([*rows[:y], [*row[:x], other, *row[x + 1 :]], *rows[y + 1 :]]))
    misses += [written(rows[:-1])] if len(rows) > 1 else []
    turned = [list(column) for column in zip(*rows, strict=True)] if len({len(r) for r in rows}) == 1 else rows
    misses += [written(turned)] if turned != rows else []
    rng.shuffle(misses)
    return rewrites, misses


def of_bracketed(gold, rng):
    """Pairs and intervals."""
    match = re.fullmatch(r"(?:\\left)?\s*([(\[])(.*?)(?:\\right)?([)\]])", gold)
    items = [item.strip(" ,") for item in cut_top(match[2], ",")] if match else []
    ends = (r"\infty", r"-\infty")
    if len(items) < 2 or any(value(item) is None and item not in ends for item in items):
        return None
    opening, closing = match[1], match[3]

    def written(items, opening=opening, closing=closing, comma=", "):
        return opening + comma.join(items) + closing

    def other(item, forms):
        return item if item in ends else next(forms(item))

    rewrites = [rf"\left{opening}{', '.join(items)}\right{closing}", written(items, comma=","), f"${written(items)}$"]
    rewrites += [written([other(item, expression_rewrites) for item in items]), written(items, comma=r",\,") + "."]
    rewrites += [written(items).replace(r"\frac", r"\dfrac"), written(items, comma=" , ")]
    if len(items) == 2 and (any(item in ends for item in items) or opening + closing != "()"):
        rewrites.append(rf"x \in {written(items)}")
    misses = [written(items[::-1])] if len(items) == 2 and not same_value(items[0], items[1]) else []
    swap = {"(": "[", "[": "(", ")": "]", "]": ")"}
    if items[0] not in ends:
        misses.append(written(items, swap[opening], closing))
    if items[-1] not in ends:
        misses.append(written(items, opening, swap[closing]))
    for place, item in enumerate(items):
        if item not in ends:
            changed = [f"{item}+1", f"-({item})", rf"{item}-\frac{{1}}{{7}}"]
            changed = [c for c in changed if not same_value(c, item)]
            misses += [written([*items[:place], c, *items[place + 1 :]]) for c in changed]
    misses += [written([*items, "0"]), written([items[0]])]
    rng.shuffle(misses)
    return rewrites, misses


def of_list(gold, rng):
    items = [item.strip(" ,") for item in cut_top(gold, ",")]
    if len(items) < 2 or any(value(item) is None for item in items):
        return None
    mixed = items[:]
    while mixed == items:
        rng.shuffle(mixed)
    rewrites = [", ".join(mixed), ",".join(items[::-1]), r"\{" + ", ".join(mixed) + r"\}", " and ".join(mixed)]
    rewrites += [", ".join(mixed[:-1]) + r" \text{ and } " + mixed[-1], " or ".join(items)]
    rewrites += [", ".join(next(expression_rewrites(item)) for item in mixed)]
    misses = [", ".join(items[:-1]), ", ".join(items[1:]), items[0]]
    for place, item in enumerate(items):
        for changed in (f"{item}+1", f"-({item})", rf"{item}+\frac{{1}}{{7}}"):
            if not any(same_value(changed, one) for one in items):
                misses.append(", ".join([*items[:place], changed, *items[place + 1 :]]))
    misses.append(", ".join([*items, f"{items[0]}+100"]))
    return rewrites, misses


def of_expression(gold, rng):
    wanted = value(gold)
    if wanted is None:
        return None
    rewrites = list(expression_rewrites(gold))
    assert all(equal(value(r), wanted) for r in rewrites if value(r) is not None), (gold, rewrites)
    rewrites += list(looks(gold))
    misses = [m for m in text_misses(gold) if value(m) is not None and not equal(value(m), wanted)]
    rng.shuffle(misses)
    rng.shuffle(rewrites)
    return rewrites, misses


def sample(golds, count, seed=0):
    """``count`` references with five rewrites and five near misses each, as (reference, rewrites, near misses)."""
    rng = random.Random(seed)
    chosen = []
    for gold in rng.sample(sorted(set(golds)), len(set(golds))):
        made = kinds(gold, rng)
        if made is not None and min(map(len, made)) >= 5:
            chosen.append((gold, rng.sample(made[0], 5), rng.sample(made[1], 5)))
        if len(chosen) == count:
            break
    return chosen
