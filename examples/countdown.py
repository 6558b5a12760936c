"""Countdown with a calculator: reach a target from some numbers, each used once.

python examples/countdown.py 2000 > countdown.jsonl
dapo train examples/countdown.yaml
"""

import ast
import json
import operator
import random
import re
import sys

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


class Countdown:
    """The answer is an expression in <answer></answer>; how often the calculator is asked costs nothing."""

    last_turn = "The calculator is off now. Write the expression in <answer></answer>."

    def reset(self, numbers, target, **row):
        self.numbers, self.target = sorted(numbers), target

    def calculate(self, expression: str) -> str:
        """Compute an expression of numbers, + - * / and parentheses.

        Args:
            expression: Such as (3 + 4) * 5.
        """
        value = evaluate(expression)
        return f"{value:g}"

    def reward(self, response):
        found = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
        try:
            value, used = evaluate(found[-1]), sorted(map(int, re.findall(r"\d+", found[-1])))
        except (IndexError, ValueError, ZeroDivisionError, SyntaxError):
            return {"value": -1.0, "correct": False, "answer_found": float(bool(found))}
        right = abs(value - self.target) < 1e-6 and used == self.numbers
        return {"value": 1.0 if right else -1.0, "correct": right, "extracted": found[-1], "answer_found": 1.0}


class Alone(Countdown):
    """Without the calculator."""

    calculate = None


def evaluate(expression: str) -> float:
    def value(node):
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError("only numbers, + - * / and parentheses")

    if len(expression) > 200:
        raise ValueError("the expression is too long")
    return float(value(ast.parse(expression.strip(), mode="eval").body))


def rows(count: int, seed: int = 0):
    rng = random.Random(seed)
    while count:
        numbers = [rng.randint(1, 25) for _ in range(rng.choice((3, 4)))]
        left = list(numbers)
        while len(left) > 1:  # some way of using them all, so that there is a solution
            a, b = left.pop(rng.randrange(len(left))), left.pop(rng.randrange(len(left)))
            left.append(rng.choice((a + b, a - b, a * b)))
        if 10 <= left[0] <= 100 and left[0] != sum(numbers):  # or a model learns to add, and nothing else
            count -= 1
            asked = f"Use each of the numbers {numbers} once, with + - * / and parentheses, to make {left[0]}. "
            asked += "Put the expression into <answer></answer>."
            yield {"prompt": asked, "numbers": numbers, "target": left[0]}


if __name__ == "__main__":
    for row in rows(int(sys.argv[1])):
        print(json.dumps(row))
