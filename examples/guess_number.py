"""Guess the number: no tools, the environment talks back. The sooner it is found, the better.

python examples/guess_number.py 1000 > numbers.jsonl
dapo generate MODEL --data numbers.jsonl --environment examples/guess_number.py:GuessNumber
"""

import json
import random
import re
import sys

from dapo.environments import Reply

MOST = 9


class GuessNumber:
    def reset(self, number, **row):
        self.number, self.guesses, self.found = int(number), 0, False

    def reply(self, text):
        """To what the model says; None would end the episode."""
        guess = re.findall(r"\d+", text)
        self.guesses += 1
        if not guess:
            return "\nSay a number.\n"
        self.found = int(guess[-1]) == self.number
        hint = "Right." if self.found else "higher" if int(guess[-1]) < self.number else "lower"
        return Reply(f"\n{hint}\n", done=self.found)

    def reward(self):
        return {"value": 1.0 - 0.1 * self.guesses if self.found else -1.0, "correct": self.found}


def rows(count: int, seed: int = 0):
    rng = random.Random(seed)
    for _ in range(count):
        yield {"prompt": f"Guess my number, 1 to {MOST}.\n", "number": rng.randint(1, MOST)}


if __name__ == "__main__":
    for row in rows(int(sys.argv[1])):
        print(json.dumps(row))
