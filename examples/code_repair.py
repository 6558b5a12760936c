"""Code repair: the reply of the tool is what the tests print. Programs run in the sandbox (bubblewrap).

python examples/code_repair.py > repairs.jsonl
dapo generate MODEL --data repairs.jsonl --environment examples/code_repair.py:Repair
"""

import json
import re

from dapo.environments.python import run_python

BROKEN = [
    ("def mean(xs):\n    return sum(xs) / (len(xs) + 1)", "mean([1, 2, 3]) == 2", "mean([5]) == 5"),
    ("def last(xs):\n    return xs[0]", "last([1, 2, 3]) == 3", "last('ab') == 'b'"),
    ("def is_even(n):\n    return n % 2", "is_even(2) is True", "is_even(7) is False"),
    ("def reverse(s):\n    return s[:-1]", "reverse('abc') == 'cba'", "reverse([1, 2]) == [2, 1]"),
    ("def biggest(xs):\n    return sorted(xs)[0]", "biggest([3, 9, 1]) == 9", "biggest([-2, -5]) == -2"),
]


class Repair:
    """The tests that are shown are not those that are paid for."""

    def reset(self, shown, hidden, **row):
        self.shown, self.hidden, self.passed = shown, hidden, False

    def run_tests(self, program: str) -> str:
        """Run the tests against a program.

        Args:
            program: The whole repaired program.
        """
        return run_python(with_test(program, self.shown), timeout_s=5.0)

    def reward(self, response):
        blocks = re.findall(r"```(?:python)?\n(.*?)```", response, re.DOTALL)
        program = blocks[-1] if blocks else response
        right = run_python(with_test(program, self.hidden), timeout_s=5.0).endswith("passed")
        return {"value": 1.0 if right else -1.0, "correct": right, "answer_found": float(bool(blocks))}


def with_test(program: str, test: str) -> str:
    return f"{program}\n\nassert {test}, {'not ' + test!r}\nprint('passed')\n"


def rows():
    for program, shown, hidden in BROKEN:
        asked = f"Repair this program. Try it with the tests, then answer with it in a ```python block.\n\n{program}"
        yield {"prompt": asked, "shown": shown, "hidden": hidden}


if __name__ == "__main__":
    for row in rows():
        print(json.dumps(row))
