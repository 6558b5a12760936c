"""Answers that are meant to hang, to eat memory or to be run: wrong within two seconds, nothing harmed."""
# ruff: noqa: E501, RUF001 (rows of a table, look-alike characters)

import asyncio
import os
import random
from pathlib import Path

import pytest

from dapo.config import MathReward
from dapo.records import Prompt, Reward
from dapo.reward.math.equivalence import equivalent, readable
from dapo.reward.math.score import _in_time, score_math
from dapo.reward.math.scorer import MathScorer

EXPENSIVE = [
    # towers, factorials, nested logarithms (failures.md 46)
    "9^{9^{9^{9}}}", "9^9^9^9", "9**9**9**9", r"2^{2^{2^{2^{2^2}}}}", r"e^{e^{e^{e^{e}}}}", r"10^{10^{10}}",
    r"10^{10^{10}} \bmod 7", r"-9^{9^{9}}", r"9^{-9^{9}}", r"\frac{1}{9^{9^{9}}}", r"9^{9^{9}}-9^{9^{9}}+1",
    r"(1+10^{-9})^{10^{9}}", r"x^{x^{x^{x^{x}}}}", r"\sqrt[9^9]{2}", r"{9^{9}}^{9^{9}}", r"\pi^{\pi^{\pi^{\pi}}}",
    "(10^{10})!", "((((9!)!)!)!)!", "100000!!", "9!!!!!!!!", r"\frac{(10^8)!}{(10^8-1)!}", r"\Gamma(10^{12})",
    r"\log(\log(\log(9^{9^{9^{9}}})))", r"\ln(\ln(\ln(10^{10^{10^{10}}})))", r"\log" * 60 + "(2)",
    r"\binom{10^{10}}{10^9}", r"\binom{1000000000}{500000000}", r"\binom{99999999}{3333333}",
    # long sums, integrals, limits
    r"\sum_{k=1}^{10^{12}} k!", r"\sum_{n=1}^{10^{10}} \frac{1}{n^2}", r"\prod_{k=1}^{10^{6}} k",
    r"\int_0^1 x^{x^{x}} dx", r"\int_0^{\infty} \frac{\sin^9 x}{x^9} e^{-x^2} dx",
    r"\lim_{x \to 0} \frac{\sin(x^{9})-x^{99}}{x^{999}}", r"\sum_{i=1}^{99}\sum_{j=1}^{99}\sum_{k=1}^{99} \frac{i^j}{k}",
    # expansions
    r"(x+1)^{100000}", r"(a+b+c+d+e+f)^{300}", r"(x+y)^{9^9}", "x+" * 900 + "x", "(x+1)" * 400,
    r"\sin(" * 50 + "x" + ")" * 50, r"\gcd(9^{9^9}, 3)", r"\lfloor 9^{9^{9}} \rfloor",
    # size and depth
    "9" * 5000, "9" * 100_000, "1e999999999", "1e-999999999", "0." + "3" * 100_000, "1," * 2000 + "1", "1," * 50_000,
    "(" * 500 + "1" + ")" * 500, "(" * 50_000, "{" * 50_000 + "}" * 50_000, "[" * 1000 + "1" + "]" * 1000,
    r"\sqrt{" * 300 + "2" + "}" * 300, r"\frac{1}{" * 40 + "2" + "}" * 40, r"\frac{1}{" * 3000 + "2" + "}" * 3000,
    r"\frac" * 1000, "-" * 3000 + "17", "+" * 3000, "=" * 3000, "<" * 3000, "1=" * 1500 + "1", "1<" * 1500 + "2",
    r"\pm" * 100 + "1", r"\pm 1," * 60, r"1 \pm 2 \pm 3 \pm 4 \pm 5 \pm 6 \pm 7 \pm 8", r"\cup(0,1)" * 300,
    "(0,1)" + r"\cup(0,1)" * 300, r"\{" * 900 + r"\}" * 900, "|" * 2000, "|x" * 900, r"\text{" * 900 + "}" * 900,
    r"\begin{pmatrix}" + "1 & " * 900 + r"1\end{pmatrix}", r"\begin{pmatrix}" * 100, r"\begin{pmatrix}9^{9^9}\end{pmatrix}",
    r"\begin{pmatrix}2&1\\1&1\end{pmatrix}^{10^9}", "x_" * 900 + "1", "^" * 3000, "2^" * 900 + "2", "1 " * 2000,
    "0." + r"\overline{" + "3" * 3000 + "}", r"\overline{" * 500 + "3" + "}" * 500, "1 1/2 " * 300, "%" * 3000, "$" * 3001,
    "17 " + r"\text{m}" * 500, "17" + r"\text{ per m}" * 300, "17 " + "m/" * 900, "17 " + "square " * 900 + "m",
    "a" * 100_000, "\\" * 100_000, " " * 100_000, "\n" * 100_000, "\x00" * 3000, "½" * 3000, "𝟗" * 3000, "√" * 3000,
    "²" * 3000, "\ud800" * 100, "‮17‬",
    # no numbers
    r"\frac{17}{0}", r"\frac{0}{0}", r"0^{-1}", r"\tan\frac{\pi}{2}", r"\infty", r"\infty-\infty", "nan", "inf", "oo", "zoo",
    "None", "NaN", "Infinity", r"\ldots", r"\dots", r"1, 2, \ldots, 17", r"\mathbb{C}", r"\forall x", r"\exists",
]  # fmt: skip

CODE = [
    "__import__('os').system('touch {canary}')", "open('{canary}','w')", "eval(\"open('{canary}','w')\")",
    "exec(\"open('{canary}','w')\")", "lambda: open('{canary}','w')", "(lambda: open('{canary}','w'))()",
    r"\pi.__class__.__mro__[-1].__subclasses__() or open('{canary}','w')", "().__class__.__bases__[0].__subclasses__()",
    r"\text{{__import__('pathlib').Path('{canary}').touch()}}", "[open('{canary}','w') for x in (1,)]",
    "f\"{{open('{canary}','w')}}\"", "compile('open(\"{canary}\",\"w\")','','exec')", "globals()['__builtins__']",
    "x.__init__.__globals__['os'].system('touch {canary}')", "Symbol('x').evalf.__globals__", "sympify(\"open('{canary}','w')\")",
    "$(touch {canary})", "`touch {canary}`", "; touch {canary} ;", "| touch {canary}", "&& touch {canary}",
    r"\write18{{touch {canary}}}", r"\immediate\write18{{touch {canary}}}", r"\input{{/etc/passwd}}", r"\openout5={canary}",
    "{{{{ ''.__class__ }}}}", "${{7*7}}", "!!python/object/apply:os.system ['touch {canary}']", "import os; os.system('x')",
    "while True: pass", "17 if open('{canary}','w') else 17", "__builtins__", "breakpoint()", "exit()", "quit", "input()",
]  # fmt: skip


def spent():
    """Processor time in user mode, which the limit counts too: a loaded kernel is no fault of an answer."""
    return os.times().user


def boxed(answer):
    return rf"It is \boxed{{{answer}}}."


def verdicts_of_workers(answers):
    """Through the whole scorer, where memory is bounded as well."""

    async def run():
        scorer = MathScorer(MathReward(workers=2, timeout_s=20, memory_mb=512))
        try:
            prompt = Prompt(0, "", (), "17")
            rewards = await asyncio.gather(*(scorer.score(prompt, boxed(answer)) for answer in answers))
            return rewards, await scorer.score(prompt, boxed("17"))
        finally:
            await scorer.close()

    rewards, after = asyncio.run(run())
    assert after.correct
    return rewards


def test_workers_get_over_expensive_answers():
    """Each is wrong; none is a failed score."""
    answers = EXPENSIVE[:10] + EXPENSIVE[10::4]
    assert [
        (a[:40], r) for a, r in zip(answers, verdicts_of_workers(answers), strict=True) if r.correct is not False
    ] == []


@pytest.mark.nightly
def test_workers_get_over_all_expensive_answers():
    rewards = verdicts_of_workers(EXPENSIVE)
    assert [(a[:40], r) for a, r in zip(EXPENSIVE, rewards, strict=True) if r.correct is not False] == []


@pytest.mark.nightly
@pytest.mark.parametrize("gold", ["17", r"x^2+\sqrt{2}", "(1, 2)"])
@pytest.mark.parametrize("number", range(len(EXPENSIVE)))
def test_expensive_answers_are_wrong_in_time(number, gold):  # failures.md 46
    started = spent()
    assert not _in_time(equivalent, gold, EXPENSIVE[number])
    assert spent() - started < 2


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(len(EXPENSIVE)))
def test_expensive_references_are_bounded_too(number):
    started = spent()
    _in_time(readable, EXPENSIVE[number])
    assert not _in_time(equivalent, EXPENSIVE[number], "17")
    assert spent() - started < 4


def test_code_in_an_answer_is_never_run(tmp_path):  # failures.md 45
    canary = tmp_path / "canary"
    for template in CODE:
        code = template.format(canary=canary)
        assert not score_math(boxed(code), "17", ["boxed"]).correct, code
        assert not score_math(f"Answer: {code}", "17", ["answer_line"]).correct, code
        assert not _in_time(equivalent, code, "17")
        _in_time(readable, code)
    assert list(tmp_path.iterdir()) == [] and not Path("touch").exists()


# --- mangled responses --------------------------------------------------------------------------------------------

SEEDS = [
    (r"\frac{3}{8}", r"<think>\boxed{7}</think> So it is $\boxed{\frac{3}{8} \approx 0.375}$."),
    ("(1,2)", r"The pair is \boxed{\left(1, 2\right)} or Answer: (2, 1)"),
    (r"(-\infty,1)\cup(2,\infty)", r"\boxed{x<1 \text{ or } x \ge 2}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\boxed{\begin{bmatrix}1 & 2 \\ 3 & 4\end{bmatrix}}"),
    ("x^2-2x-3", r"Answer: **$(x-3)(x+1) = x^2-2x-3$**"),
    (r"12\text{ cm}^2", r"\fbox{12 square centimeters, or 0.0012 m^2}"),
    ("1,234,567", r"\boxed{\$1{,}234{,}567.00}"),
    (r"\text{Tuesday}", r"\boxed{\text{Tuesday}}"),
    ("132_5", r"\boxed{132_{5} = 42}"),
    (r"1 \pm \sqrt{2}", r"\boxed{x = 1 \pm \sqrt{2}, \{3:45\}, \log_2 12, \binom{10}{3}!}"),
]
PIECES = [
    r"\boxed{", "}", "{", r"\frac", r"\sqrt", "^", "_", "<think>", "</think>", "Answer:", r"\text{", r"\left(", ")", "[",
    r"\pm", r"\cup", r"\le", "=", ",", "$", "%", r"\\", "!", "9^{9^{9}}", "0", "-", r"\infty", r"\in", "|", ":", "√", "½",
    "１", "\x00", "\ud800", r"\begin{pmatrix}", r"\end{pmatrix}", "&", r"\sum_{k=1}^{99}", "x", r"\int", " ", "\n",
]  # fmt: skip


def mangled(rng):
    """A reference and a response with up to eight pieces cut out, doubled, swapped or put in."""
    gold, text = rng.choice(SEEDS)
    for _ in range(rng.randint(1, 8)):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.randint(0, 12))
        middle = rng.choice(
            [text[start:end] * 2, "", rng.choice(PIECES), text[start:end][::-1], rng.choice(PIECES) * 9]
        )
        text = text[:start] + middle + text[end:]
    return gold, text


def check_mangled(count):
    rng = random.Random(count)
    for _ in range(count):
        gold, text = mangled(rng)
        started = spent()
        reward = score_math(text, gold, ["boxed", "answer_line"])
        assert isinstance(reward, Reward) and reward.error is None, (gold, text)
        assert type(reward.correct) is bool and reward.value == (1.0 if reward.correct else -1.0), (gold, text)
        assert reward.parts.keys() == {"answer_found", "out_of_time"}, (gold, text)
        assert reward.parts["answer_found"] == float(bool(reward.extracted)), (gold, text)
        assert spent() - started < 4, (gold, text)


def test_500_mangled_responses():
    check_mangled(500)


@pytest.mark.nightly
def test_10000_mangled_responses():
    check_mangled(10_000)
