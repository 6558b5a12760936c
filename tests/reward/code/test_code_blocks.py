import time

from hypothesis import given
from hypothesis import strategies as st

from dapo.reward.code.blocks import defines, find_program

SOLUTION = "def add(a, b):\n    return a + b\n"
MARKS = ("python3.11", "ipython3", "{.python}", "{.python .numberLines}")
USAGE = "print(add(1, 2))\n"


def fenced(text, language="python", marks="```"):
    return f"{marks}{language}\n{text}{marks}\n"


def test_a_usage_block_after_the_solution_is_not_the_program():
    response = f"First:\n{fenced(SOLUTION)}Use it so:\n{fenced(USAGE)}"
    assert find_program(response, "add") == SOLUTION
    assert find_program(response, None, ["add"]) == SOLUTION


def test_the_last_block_that_defines_the_entry_point_counts():
    better = SOLUTION.replace("a + b", "b + a")
    assert find_program(fenced(SOLUTION) + fenced(better) + fenced(USAGE), "add") == better


def test_a_program_that_is_run_is_the_last_python_block():
    response = (
        fenced("print(1)\n") + fenced("print(2)\n") + fenced("7\n", "") + fenced("2\n", "text") + fenced("ls\n", "bash")
    )
    assert find_program(response, "__main__") == "print(2)\n"
    assert find_program(response, None) == "print(2)\n"
    assert find_program(fenced("print(1)\n", "") + fenced("print(2)\n", ""), None) == "print(2)\n"


def test_languages_are_told_apart():
    for language in ("python", "py", "python3", "Python", "PY", "", "python title=a.py", *MARKS):
        assert find_program(fenced(SOLUTION, language), "add") == SOLUTION
    for language in ("javascript", "cpp", "text", "console", "pycon", "{.r}"):
        assert find_program(fenced(SOLUTION, language), "add") is None


def test_methods_need_their_class():
    method = "class Solution:\n    def add(self, a: int) -> int:\n        return a\n"
    other = "class Solution:\n    def sub(self, a):\n        return a\n"
    assert defines(method, "Solution().add")
    assert not defines(other, "Solution().add")
    assert find_program(fenced(method) + fenced(other), "Solution().add") == method


def test_definitions_stand_at_the_outermost_level():
    assert defines("add = lambda a, b: a + b\n", "add")
    assert defines("add: object = None\n", "add")
    assert defines("async def add(a): ...\n", "add")
    assert defines("class add: ...\n", "add")
    assert not defines("if add == 3: pass\n", "add")
    assert not defines("add == 3\n", "add")
    assert not defines("def add_all(): ...\n", "add")
    assert not defines("def f():\n    def add(): ...\n", "add")
    assert not defines("# def add(): ...\n", "add")


def test_thinking_does_not_count():
    thought = f"<think>\n{fenced(SOLUTION)}</think>\n"
    assert find_program(thought, "add") is None
    assert find_program(thought + fenced(SOLUTION.replace("a +", "1 +")), "add") == SOLUTION.replace("a +", "1 +")
    assert find_program(f"{fenced(SOLUTION)}</think>\nno code", "add") is None
    assert find_program(f"<think>\n{fenced(SOLUTION)}", "add") is None


def test_a_fence_that_is_not_closed_goes_to_the_end():
    assert find_program(f"```python\n{SOLUTION}", "add") == SOLUTION + "\n"
    assert find_program(f"text\n{fenced(USAGE)}```python\n{SOLUTION}", "add") == SOLUTION + "\n"


def test_fences_within_fences():
    inner = 'def add(a, b):\n    """\n    ```\n    add(1, 2)\n    ```\n    """\n    return a + b\n'
    assert find_program(fenced(inner), "add") == inner
    assert find_program(fenced(fenced(SOLUTION, ""), "python", "````"), "add") == fenced(SOLUTION, "")
    assert find_program(fenced(SOLUTION, "python", "~~~"), "add") == SOLUTION


def test_blocks_in_a_list_lose_their_indent_and_windows_line_ends_go():
    item = "1. So:\n   ```python\n   def add(a, b):\n       return a + b\n   ```\n"
    assert find_program(item, "add") == SOLUTION
    assert find_program(fenced(SOLUTION).replace("\n", "\r\n"), "add") == SOLUTION


def test_text_without_fences_is_a_program_if_it_is_python_and_does_something():
    assert find_program(SOLUTION, "add") == SOLUTION
    assert find_program(SOLUTION, "sub") is None
    assert find_program(USAGE, None) == USAGE
    for prose in (
        "",
        "42",
        "answer",
        "The answer is 42.",
        "'done'",
        "def add(a, b):\n",
        "import (",
        "\x00",
        "(" * 5000,
    ):
        assert find_program(prose, None) is None
        assert find_program(prose, "add") is None


def test_without_a_definition_the_last_marked_block_is_tried():
    assert find_program(fenced(USAGE) + fenced("7\n", ""), "add") == USAGE


def test_long_lines_take_no_time():
    started = time.process_time()
    for text in ("```" + "a" * 10**6 + "`", "~" * 10**6 + "`", " " * 10**6 + "`", "```\n" * 10**5, "<think>" * 10**5):
        find_program(text, "add")  # quadratic, one of these would take hours
    assert time.process_time() - started < 60


@given(
    st.text(alphabet="`~ \n\tpythondef add():=<>/think\r\x00\ud800", max_size=300),
    st.sampled_from(["add", None, "S().m"]),
)
def test_any_text_has_a_program_or_none(text, entry_point):
    program = find_program(text, entry_point)
    assert program is None or isinstance(program, str)
    found = find_program(f"{text}\n</think>\n````python\n{SOLUTION}````\n", "add")
    assert found is not None and "def add" in found
