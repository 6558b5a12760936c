"""LaTeX whose backslashes were eaten is found; tabs and lines of text and code are not taken for it."""

import json

import pytest
import yaml

from dapo.config import build_config, warnings_for
from dapo.data.rows import EATEN, Keys, check_row, parse_json
from dapo.util.escapes import eaten, eaten_in

# --- what JSON, YAML and Python make of LaTeX with single backslashes ---------------------------------------------


@pytest.mark.parametrize(
    "latex",
    [
        *(r"\boxed{}", r"\frac{1}{2}", r"\beta", r"\forall x", r"\bar{x}", r"\binom{4}{2}", r"\begin{array}"),
        *(r"4\text{ cm}", r"\theta", r"2\times 3", r"\textbf{A}", r"\tfrac{1}{2}", r"\tan\theta", r"\tan(x)"),
        *(r"\tilde{x}", r"\therefore x", r"\triangle ABC"),
        *(r"\nabla f", r"$x \neq 0$", r"$\nu + 1$", r"x \notin A", r"$a \ne b$", r"$a \nmid b$"),
        *(
            r"$\tau$",
            r"\tau",
            r"x \to 0",
            r"$\to$",
            r"$\top$",
            r"\tanh x",
            r"\tfrac12",
            r"$\tilde x$",
            r"\tbinom{4}{2}",
        ),
        *(
            r"$\text cm$",
            r"\textnormal{a}",
            r"\tag{1}",
            r"\triangleleft",
            r"$\tan x$",
            r"$\nexists x$",
            r"$a \nless b$",
        ),
        *(r"{\rm x}", r"\rbrace", r"\rbrack", r"$x \neg p$", r"$\norm{x}$"),
        *(r"\rho", r"\right)", r"\rangle", r"\rm{d}", r"\rightarrow", r"90 \rfloor"),
    ],
)
def test_a_command_that_json_took_the_backslash_of(latex):
    said = eaten(json.loads(f'"so {latex}"'))
    command = latex[latex.index("\\") :]
    name = command[: next((k for k, c in enumerate(command[1:], 1) if not c.isalpha()), len(command))]
    assert said is not None and f"where {name} was probably meant" in said


@pytest.mark.parametrize("latex", [r"\vec{a}", r"\alpha", r"\epsilon", r"\Lambda + 1", r"\Phi", r"\boxed{}"])
def test_a_command_that_yaml_took_the_backslash_of(latex):
    name = latex.partition("{")[0].partition(" ")[0]
    assert f"where {name} was probably meant" in str(eaten(yaml.safe_load(f'"{latex}"')))


@pytest.mark.parametrize(
    "answer",
    ["x \neq 0", "\nu", "\nu_0", "\neg p", "a \nmid b", "\norm{x}", "\top", "\to", "4\text cm", "\tilde x", "\rm x"],
)
def test_in_an_answer_a_line_does_not_begin_with_the_rest_of_a_command(answer):
    assert eaten(answer) is None
    assert "probably meant" in str(eaten(answer, is_answer=True))


@pytest.mark.parametrize("text", ["a\x00b", "\x1b[31mred", "page\x0c", "a\x7f"])
def test_other_control_characters_are_named(text):
    assert "control character" in str(eaten(text)) and "meant" not in str(eaten(text))


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n\treturn x\n",
        "a\tb\tc\n1\t2\t3\r\n4\t5\t6\r\n",
        "name\ttext\nx\ttimes\n",
        "Numbers:\nu = 3\neq = x + 1\ne = 2.7\nnot a word\nnorth\nnew\n",
        "if x:\n\tan = 1\n\ttext = 2\n\ttop = 3\n\tto = 4\n",
        "\tan apple\n\ttangent\n\textra\n",
        "word\tan\to\text\top\tag\na\to\tb\n",
        "all:\n\ttar -x\n\ttouch a\n\trm b\nless\nnorm\nsimilar\nexists\nparallel",
        "id\ttotal\ttype\ttitle\n4\tcm\n",
        "one\rtwo\rright-hand side\rrho-like",
        r"\boxed{\frac{1}{2}} \neq \theta",
        "Let $x$ be\nu of $y$\ne.g. $z$",
        "$$\nu = 3\n$$ and\nmid-way $x$",
        "é\u2028new line\u2029new part",
        "",
    ],
)
def test_tabs_and_lines_of_text_and_code_are_fine(text):
    assert eaten(text) is None


def test_what_stands_behind_a_long_text_is_found():
    assert eaten("\t$\nu " * 50_000 + "\boxed") is not None


# --- rows and recipes ---------------------------------------------------------------------------------------------


def test_rows_name_each_key():
    lines = [
        r'{"prompt": "Half of one? Put it in \boxed{}.", "answer": "\frac{1}{2}"}',
        r'{"prompt": [{"role": "user", "content": "Angle? Use \boxed{}"}], "answer": "\theta"}',
        r'{"prompt": "Set? \\boxed{}", "answer": "4\text{ cm}", "extra": {"solution": ["\beta"]}}',
        r'{"prompt": "Set? \\boxed{}", "answer": "\\theta", "extra": "a\tb"}',
    ]
    rows = (check_row(parse_json(line.encode()), Keys(), "") for line in lines)
    first, second, third, fourth = (dict(row.doubts(Keys())).get(EATEN) for row in rows)
    assert "prompt holds" in first and "\\boxed" in first and "answer holds" in first and "\\frac" in first
    assert "prompt[0].content holds" in second and "\\theta" in second
    assert "prompt" not in third and "\\text" in third and "extra.solution[0] holds" in third
    assert fourth is None


def test_texts_of_a_recipe_are_looked_at():
    texts = {"data": {"instruction": "\nPut the final answer in \boxed{}.", "system": "Use \frac."}}
    config = build_config({"model": {"path": "m"}, "rollout": {"stop": ["\n\n", "\n\x0b"]}, **texts})
    found = [text for text in warnings_for(config) if "control character" in text]
    assert [text.partition(" ")[0] for text in found] == ["data.instruction", "data.system", "rollout.stop[1]"]
    assert eaten_in({"a": ["x", {"b": "\boxed"}]}) == eaten_in({"b": "\boxed"}, "a[1]")
