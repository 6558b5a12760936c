"""Programs and the verdicts that they must get: honest ones, wrong ones, and attacks on the grader's own design."""

import subprocess
import sys
from pathlib import Path

import pytest
from grading import grade

from dapo.config import CodeReward
from dapo.errors import RewardError
from dapo.reward.code.grade import Grade, Grader, same_output
from dapo.reward.code.names import read_tests
from dapo.reward.code.program import Usage

QUICK = CodeReward(kind="code", test_timeout_s=1.0)
"""For programs that do not end by themselves."""

SQUARE = ["assert square(3) == 9", "assert square(-4) == 16", "assert square(11) == 121"]
SUM = [{"stdin": "3 4\n", "stdout": "7\n"}, {"stdin": "10 -2\n", "stdout": "8\n"}]

YES = """class Yes:
    def __eq__(self, o): return True
    def __ne__(self, o): return False
    def __lt__(self, o): return True
    __gt__ = __le__ = __ge__ = __contains__ = __lt__
    def __bool__(self): return True
    def __hash__(self): return 0
    def __sub__(self, o): return 0.0
    __rsub__ = __add__ = __radd__ = __mul__ = __sub__
    def __abs__(self): return 0.0
    __float__ = __abs__
    def __len__(self): return 3
    def __iter__(self): return iter([self] * 3)
    def __getitem__(self, k): return self
    __getattr__ = __getitem__
    def __call__(self, *a): return self
"""


def read_cases(name):
    """Programs and their tests by the name of the case."""
    cases = {}
    for section in (Path(__file__).with_name(name).read_text(encoding="utf-8")).split("\n=== ")[1:]:
        title, _, body = section.partition("\n")
        program, *tests = f"\n{body}\n".split("\n---")
        named = {" square": SQUARE, " sum": SUM}
        cases[title] = (
            program.lstrip("\n").replace("# Yes\n", YES) + "\n",
            named[tests[0].rstrip()] if tests[0].startswith(" ") else [test.strip("\n") for test in tests],
        )
    return cases


HONEST, ATTACKS = read_cases("honest.txt"), read_cases("attacks.txt")


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_passes(name):
    assert grade(*HONEST[name]) == "pass"


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_does_not_pass_any_of_its_tests(name):
    program, tests = ATTACKS[name]
    assert tests
    for test in tests:
        assert grade(program, [test], None, QUICK) in ("fail", "error", "timeout")


def test_verdicts_tell_how_a_program_fails():
    assert grade("def square(x):\n    return 0\n", SQUARE) == "fail"
    assert grade("def square(x):\n    return 1 / 0\n", SQUARE) == "error"
    assert grade("def cube(x):\n    return x\n", SQUARE) == "error"
    assert grade("def square(x:\n    return x\n", SQUARE) == "error"
    assert grade("print(int(input()))\n", SUM) == "error"
    assert grade("print(8)\n", SUM) == "fail"


def test_text_that_is_no_program_is_an_error():
    for program in ("print(7)\x00\n", "(" * 1_000_000, "print('\ud83d')\n", "-" * 500_000 + "1", "é\ud83d"):
        assert grade(program, SUM) == grade(program, SQUARE) == "error"
    assert (grade("", SUM), grade("", SQUARE)) == ("fail", "error")  # it prints nothing, and has no function


def test_time_is_up_in_a_call_at_the_top_and_in_the_comparison():
    assert grade("def square(x):\n    while True:\n        pass\n", SQUARE, None, QUICK) == "timeout"
    assert grade("while True:\n    pass\n", SQUARE, None, QUICK) == "timeout"
    assert grade("while True:\n    pass\n", SUM, None, QUICK) == "timeout"
    # equal hashes: a set of these takes hours, on the grader's side
    clash = "def f(n):\n    return [k * (2 ** 61 - 1) for k in range(30_000)]\n"
    assert grade(clash, ["assert len(set(f(1))) == 1"], None, QUICK) == "timeout"
    assert grade("def square(x):\n    return x * x\n", SQUARE, None, QUICK) == "pass"  # and it goes on


def test_a_test_that_would_show_its_value_to_an_object_of_the_program_says_so():
    program = "class V:\n    x = 6\n    def __mul__(self, k):\n        return self\n"
    verdict = Grader(CodeReward(kind="code")).grade(program, read_tests(["assert (V() * 3).x == 6"], "V"))
    assert verdict.outcomes == ["fail"]
    assert "to show the test's value" in verdict.detail


def test_children_of_a_program_do_not_stretch_its_time():
    spin = "import os, time\nend = time.monotonic() + 2\nfor _ in range(8):\n    if os.fork() == 0:\n"
    spin += "        while True:\n            pass\nwhile time.monotonic() < end:\n    pass\nprint(7)\n"
    assert grade(spin, [{"stdin": "", "stdout": "7"}], None, QUICK) == "timeout"


def test_names_of_the_math_module_are_not_the_programs_beside_an_entry_point():
    program = "def f(x):\n    return 0\ndef fabs(x):\n    return 0\n"
    assert grade(program, ["assert fabs(f(2) - 2.5) < 1e-6"], "f") == "fail"
    assert grade(program.replace("return 0", "return 2.5", 1), ["assert fabs(f(2) - 2.5) < 1e-6"], "f") == "pass"
    assert grade(program, ["assert fabs(2) == 0"], "fabs") == "pass"


def test_asserts_count_however_python_was_started(monkeypatch):
    monkeypatch.setenv("PYTHONOPTIMIZE", "2")
    code = "from grading import grade; print(grade('def f(x): return x', ['assert f(1) == 2']))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=Path(__file__).parent)
    assert done.stdout == "fail\n"


def test_output_up_to_the_limit_is_read():
    tests = [{"stdin": "", "stdout": "a" * 900_000}]
    assert grade("print('a' * 900_000)\n", tests) == "pass"
    assert grade("print('a' * 900_000)\n", tests, None, CodeReward(kind="code", max_output_kb=800)) == "fail"


def test_input_that_is_not_read_is_no_fault():
    assert grade("print(1)\n", [{"stdin": "x" * 3_000_000, "stdout": "1"}]) == "pass"


def test_outputs_are_equal_word_by_word_and_line_by_line():
    assert same_output(b"1  2 \r\n3\n\n", "1 2\n3")
    assert not same_output(b"1 2 3\n", "1 2\n3")
    assert not same_output(b"1\n\n2\n", "1\n2\n")
    assert not same_output(b"\xff", "ÿ")
    assert same_output(b"", "\n")


def test_printed_numbers_are_compared_as_text_unless_a_tolerance_is_given():
    program, third = "print(round(1/3, 6))\n", {"stdin": "", "stdout": "0.333333333333\n"}
    assert grade(program, [third]) == "fail"
    assert grade(program, [{**third, "float_tolerance": 1e-7}]) == "fail"
    assert grade(program, [{**third, "float_tolerance": 1e-6}]) == "pass"
    assert grade(program, [{**third, "float_tolerance": 0}]) == "fail"
    with pytest.raises(RewardError, match="test 1: float_tolerance must be a number from 0 to 1"):
        grade(program, [{**third, "float_tolerance": "much"}])


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("0.3333", "0.33333333", True),  # 3.3e-5 apart
        ("0.333", "0.33333333", False),  # 3.3e-4 apart
        ("1000.05", "1000.0", True),  # relative to the expected number: 5e-5
        ("1000.5", "1000.0", False),
        ("1", "1.0", True),
        ("1e3", "1000.0", True),
        ("-.5", "-0.5", True),
        ("1000", "1001", False),  # whole numbers are exact, however near
        ("10000001", "10000000", False),
        ("nan", "nan", True),  # as text
        ("nan", "1.0", False),
        ("inf", "1e999", False),
        ("1e999", "1.0", False),
        ("x 0.50001", "x 0.5", True),
        ("y 0.5", "x 0.5", False),
        ("0.5 0.5", "0.5", False),
        ("0.5\n0.5", "0.5 0.5", False),
        ("1_0.0", "10.0", False),
    ],
)
def test_a_tolerance_of_1e_4(output, expected, same):
    assert same_output(output.encode(), expected, 1e-4) is same


def test_a_program_and_those_that_it_starts_print_and_read_integers_of_any_length():
    assert grade("n = int(input())\nprint(str(10**n)[:1] + str(len(str(10**n))))\n", io("5000\n", "15001\n")) == "pass"
    assert grade("print(int(input()) % 9)\n", io("7" * 5000, "8\n")) == "pass"  # 35,000 is 8 modulo 9
    assert grade(f"print(1{'0' * 5000} % 9)\n", io("", "1\n")) == "pass"
    child = (
        "import subprocess, sys\nprint(subprocess.check_output([sys.executable, '-c', 'print(10**5000)']).decode())\n"
    )
    assert grade(child, io("", "1" + "0" * 5000)) == "pass"
    assert grade("def f(n):\n    return 10**n\n", [f"assert f(5000) == 1{'0' * 5000}"]) == "pass"
    assert grade("def f(n):\n    return 10**n\n", [f"assert f(5000) == 2{'0' * 5000}, str(f(5000))"]) == "fail"
    assert grade("print(10**5000)\n", io("", "1" + "0" * 5000), None, CodeReward(kind="code", sandbox="none")) == "pass"


def io(stdin, stdout):
    return [{"stdin": stdin, "stdout": stdout}]


def test_a_helper_beside_a_known_entry_point_is_the_programs():
    program = "def f(x):\n    return [4]\ndef same_tree(a, b):\n    return a == b\n"
    assert grade(program, ["assert same_tree(f(2), [4])"], "f") == "pass"
    assert grade(program, ["assert same_tree(f(2), [5])"], "f") == "fail"


@pytest.mark.parametrize("script", [True, False])
def test_several_slow_tests_end_when_the_time_over_all_of_them_is_spent(script):
    program = "import time\ndef f():\n    time.sleep(0.4)\n    return 1\n" + "print(f())\n" * script
    tests = read_tests(io("", "1") * 8 if script else ["assert f() == 1"] * 8, "f")
    verdict = Grader(CodeReward(kind="code", timeout_s=0.9, score="fraction")).grade(program, tests)
    assert verdict.outcomes[0] == "pass"
    assert verdict.outcomes[4:] == ["timeout"] * 4  # four would have taken 1.6 s
    assert "no time is left" in verdict.detail


def test_several_runs_take_the_time_of_all_and_the_memory_of_the_largest():
    verdict = Grade()
    for usage in (Usage(0, 1.0, 300), Usage(0, 2.0, 200)):
        verdict.used(usage)
    assert (verdict.usage.cpu_s, verdict.usage.memory_bytes) == (3.0, 300)


def test_the_detail_is_that_of_the_first_test_that_does_not_pass():
    verdict = Grader(CodeReward(kind="code")).grade(
        "print(input())\n", read_tests(io("1", "1") + io("2", "3") + io("4", "5"), None)
    )
    assert verdict.outcomes == ["pass", "fail", "fail"]
    assert verdict.detail == "test 2: its output is b'2\\n'"


def test_tests_may_be_json_text_and_a_check_function_is_called():
    program = "def f(x):\n    return x\n"
    assert grade(program, '["assert f(1) == 1"]') == "pass"
    check = "def check(candidate):\n    assert candidate(1) == 2\n"
    assert grade(program, [check], "f") == "fail"
    assert grade(program, [check.replace("2", "1")], "f") == "pass"


def test_solution_classes_get_their_usual_imports_and_no_others():
    program = "class Solution:\n    def f(self, xs: List[int]) -> int:\n        return heappop(xs) + gcd(4, 6)\n"
    assert grade(program, ["assert Solution().f(xs=[1, 2]) == 3"], "Solution().f") == "pass"
    assert grade("def f(xs):\n    return gcd(4, 6)\n", ["assert f(1) == 2"], "f") == "error"


def test_tests_after_one_that_the_program_does_not_survive_run_with_a_new_one():
    program = "import os\ndef f(x):\n    if x == 2:\n        os._exit(0)\n    return x\n"
    tests = read_tests([f"assert f({x}) == {x}" for x in (1, 2, 3)], "f")
    verdict = Grader(CodeReward(kind="code")).grade(program, tests)
    assert verdict.outcomes == ["pass", "error", "pass"]
    assert verdict.share == 2 / 3
    assert verdict.outcome == "error"
    assert verdict.detail.startswith("test 2: ")
