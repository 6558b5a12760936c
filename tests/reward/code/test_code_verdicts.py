"""Programs and the verdicts that they must get: honest ones, wrong ones, and attacks on the grader's own design."""

import pytest

from dapo.errors import RewardError
from dapo.reward.code.grade import grade

SQUARE = ["assert square(3) == 9", "assert square(-4) == 16", "assert square(11) == 121"]
SUM = [{"stdin": "3 4\n", "stdout": "7\n"}, {"stdin": "10 -2\n", "stdout": "8\n"}]

HONEST = {
    "plain": ("def square(x):\n    return x * x\n", SQUARE),
    "float that equals an int": ("def square(x):\n    return float(x * x)\n", SQUARE),
    "prints while it works": ("print('hello')\ndef square(x):\n    print(x)\n    return x * x\n", SQUARE),
    "recursion": (
        "import sys\nsys.setrecursionlimit(9000)\ndef f(n):\n    return 0 if n == 0 else 1 + f(n - 1)\n",
        ["assert f(8000) == 8000"],
    ),
    "builtin name as entry": ("def sum(a, b):\n    return a + b\n", ["assert sum(10, 15) == 25"]),
    "objects as arguments": (
        "class Pair:\n    def __init__(self, a, b):\n        self.a, self.b = a, b\n"
        "def total(pairs):\n    return [p.a + p.b for p in pairs]\n",
        ["assert total([Pair(1, 2), Pair(a=3, b=4)]) == [3, 7]", "assert Pair(5, 6).b == 6"],
    ),
    "state in an object": (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)\n",
        ["s = Stack()\ns.push(1)\ns.push([2])\nassert len(s) == 2\nassert s.pop() == [2] and s.pop() == 1"],
    ),
    "generator": ("def count(n):\n    yield from range(n)\n", ["assert list(count(600)) == list(range(600))"]),
    "endless generator": (
        "def naturals():\n    n = 0\n    while True:\n        yield n\n        n += 1\n",
        ["import itertools\nassert list(itertools.islice(naturals(), 5)) == [0, 1, 2, 3, 4]"],
    ),
    "next of an iterator": ("def it():\n    return iter([4, 5])\n", ["i = it()\nassert next(i) == 4 and next(i) == 5"]),
    "every plain type": (
        "def same(x):\n    return x\n",
        [
            "for x in (None, True, 0, -7, 2**200, 0.1, -0.0, float('inf'), 'é\\x00\\ud83d\\U0001f600\"', b'\\xff', (1,), [],"
            " {1, 2}, frozenset('ab'), {(1, 2): [3]}, 1 + 2j, range(3), bytearray(b'a'), [[{'k': (1, {2})}]]):\n"
            "    assert same(x) == x and type(same(x)) is type(x), x",
            "y = same(float('nan'))\nassert y != y",
        ],
    ),
    "standard types": (
        "from collections import Counter, OrderedDict, defaultdict, deque, namedtuple\nfrom decimal import Decimal\n"
        "from fractions import Fraction\nimport datetime\nP = namedtuple('P', 'x y')\n"
        "def values():\n    d = defaultdict(int)\n    d['a'] += 1\n"
        "    return [Counter('aab'), OrderedDict(a=1), d, deque([1, 2]), P(1, 2), Decimal('1.10'), Fraction(2, 4),\n"
        "            datetime.date(2024, 2, 29)]\n",
        [
            "from collections import deque\nfrom decimal import Decimal\nfrom fractions import Fraction\nimport datetime\n"
            "assert values() == [{'a': 2, 'b': 1}, {'a': 1}, {'a': 1}, deque([1, 2]), (1, 2), Decimal('1.1'), "
            "Fraction(1, 2), datetime.date(2024, 2, 29)]",
            "assert values()[4].x == 1",
        ],
    ),
    "enum members": (
        "import enum\nclass C(enum.IntEnum):\n    RED = 1\ndef red():\n    return C.RED\n",
        ["assert red() == 1 and red() + 1 == 2 and red().name == 'RED' and red() < 2 and red() in (1, 3)"],
    ),
    "expected exception": (
        "class Bad(ValueError):\n    pass\ndef f(x):\n    if x < 0:\n        raise Bad('below', x)\n    return x\n",
        [
            "try:\n    f(-1)\nexcept ValueError as e:\n    assert e.args == ('below', -1)\nelse:\n    assert False",
            "try:\n    f(-1)\nexcept Bad:\n    pass\nelse:\n    assert False",
        ],
    ),
    "changes its argument": (
        "def sort_in_place(xs):\n    xs.sort()\ndef drop(d):\n    d['a'].append(1)\n    del d['b']\n",
        [
            "xs = [3, 1, 2]\nassert sort_in_place(xs) is None\nassert xs == [1, 2, 3]",
            "inner = []\nd = {'a': inner, 'b': 0}\ndrop(d)\nassert d == {'a': [1]} and inner == [1]",
        ],
    ),
    "around the call": (
        "def roots(n):\n    return [1.0, 2.0000000001]\n",
        [
            "assert math.isclose(sum(roots(2)), 3, rel_tol=1e-6)",
            "assert set(map(round, roots(1))) == {1, 2} and sorted(roots(1), reverse=True)[1] == 1",
            "assert all(abs(a - b) < 1e-6 for a, b in zip(roots(0), (1, 2)))",
        ],
    ),
    "function as argument": (
        "def apply(f, xs):\n    return [f(x) for x in xs]\ndef catch(f):\n    try:\n        return f()\n"
        "    except KeyError:\n        return 'caught'\n",
        [
            "assert apply(lambda x: x + 1, (1, 2)) == [2, 3] and apply(str, [1]) == ['1']",
            "assert catch(lambda: {}['x']) == 'caught'",
            "assert apply(abs, iter([-1, -2])) == [1, 2]",
        ],
    ),
    "program's function as key": ("def key(x):\n    return -x\n", ["assert sorted([1, 3, 2], key=key) == [3, 2, 1]"]),
    "objects among themselves": (
        "class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)\n"
        "    def __mul__(self, k): return V(self.x * k)\n    def __eq__(self, o): return self.x == o.x\n"
        "    def __str__(self): return f'V({self.x})'\n    def __lt__(self, o): return self.x < o.x\n"
        "    def __iter__(self): return iter([self.x])\n",
        [
            "assert V(1) + V(2) == V(3) and (V(2) * 3).x == 6 and str(V(1)) == 'V(1)' and V(1) != V(2)",
            "assert min(V(3), V(1)).x == 1 and list(V(5)) == [5] and isinstance(V(1), V) and not isinstance(1, V)",
        ],
    ),
    "check function": (
        "def double(x):\n    return 2 * x\n",
        ["def check(candidate):\n    for k in range(50):\n        assert candidate(k) == k + k\n\ncheck(double)"],
    ),
    "class of the test's": (
        "def depth(n):\n    return 0 if n is None else 1 + depth(n.next)\ndef cut(n):\n    n.next = None\n",
        [
            "class Node:\n    def __init__(self, next=None): self.next = next\n"
            "n = Node(Node(Node()))\nassert depth(n) == 3\ncut(n)\nassert n.next is None",
        ],
    ),
    "main guard is not run": ("def square(x):\n    return x * x\nif __name__ == '__main__':\n    input()\n", SQUARE),
    "annotations and dataclasses": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass(order=True)\nclass P:\n"
        "    x: int = 0\ndef square(x: int) -> int:\n    return P(x).x ** 2\n",
        SQUARE,
    ),
    "exit() after the output": ("a, b = map(int, input().split())\nprint(a + b)\nexit()\n", SUM),
    "output without newline": ("import sys\nsys.stdout.write(str(sum(map(int, input().split()))))\n", SUM),
    "windows line ends": ("print(sum(map(int, input().split())), end='\\r\\n')\n", SUM),
    "threads": (
        "import threading\nout = []\nt = threading.Thread(target=lambda: out.append(sum(map(int, input().split()))))\n"
        "t.start()\nt.join()\nprint(out[0])\n",
        SUM,
    ),
    "child process": (
        "import subprocess, sys\na = input()\nr = subprocess.run([sys.executable, '-c', 'print(sum(map(int, input()"
        ".split())))'], input=a, capture_output=True, text=True)\nprint(r.stdout)\n",
        SUM,
    ),
    "worker processes": (
        "from multiprocessing import Pool\nif __name__ == '__main__':\n    with Pool(2) as p:\n"
        "        print(sum(p.map(int, input().split())))\n",
        SUM,
    ),
    "large output within the limit": ("print('a' * 900_000)\n", [{"stdin": "", "stdout": "a" * 900_000}]),
    "writes to its scratch folder": (
        "open('x', 'w').write('1')\nprint(open('x').read())\n",
        [{"stdin": "", "stdout": "1"}],
    ),
    "replaces a builtin": ("import builtins\nbuiltins.len = lambda x: 3\ndef square(x):\n    return x * x\n", SQUARE),
}

YES = (
    "class Yes:\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\n"
    "    def __lt__(self, o): return True\n    __gt__ = __le__ = __ge__ = __lt__\n"
    "    def __bool__(self): return True\n    def __hash__(self): return 0\n    def __contains__(self, o): return True\n"
    "    def __sub__(self, o): return 0.0\n    __rsub__ = __add__ = __radd__ = __mul__ = __sub__\n"
    "    def __abs__(self): return 0.0\n    def __float__(self): return 0.0\n    def __len__(self): return 3\n"
    "    def __iter__(self): return iter([self] * 3)\n    def __getitem__(self, k): return self\n"
    "    def __getattr__(self, n): return self\n    def __call__(self, *a): return self\n"
)
ATTACKS = {
    "equal inside a list": (
        YES + "def f():\n    return [Yes(), Yes()]\n",
        ["assert f() == [1, 2]", "assert [1, 2] == f()"],
    ),
    "equal as a key": (YES + "def f():\n    return {Yes(): Yes()}\n", ["assert f() == {1: 2}"]),
    "contains everything": (YES + "def f():\n    return Yes()\n", ["assert 5 in f()"]),
    "below everything": (YES + "def f():\n    return Yes()\n", ["assert f() < 3", "assert 3 > f()", "assert f() <= 0"]),
    "difference is zero": (YES + "def f():\n    return Yes()\n", ["assert abs(f() - 2.5) < 1e-6"]),
    "difference is an object": (
        YES
        + "class Sly(Yes):\n    def __sub__(self, o): return Yes()\n    __rsub__ = __sub__\ndef f():\n    return Sly()\n",
        ["assert abs(f() - 2.5) < 1e-6", "assert abs(2.5 - f()) < 1e-6", "assert round(f() - 2.5, 3) == 0"],
    ),
    "str that equals": (
        "class S(str):\n    def __eq__(self, o): return True\n    __hash__ = str.__hash__\ndef f():\n    return S('a')\n",
        ["assert f() == 'b'", "assert f() in ('b', 'c')"],
    ),
    "dict that equals": (
        "class D(dict):\n    def __eq__(self, o): return True\n    def __getitem__(self, k): return 1\ndef f():\n    return D()\n",
        ["assert f() == {'a': 1}"],
    ),
    "metaclass": (
        "class M(type):\n    def __eq__(c, o): return True\n    __hash__ = type.__hash__\nclass A(metaclass=M): pass\n"
        "def f():\n    return A\n",
        ["assert f() == 3"],
    ),
    "patched builtins": (
        "import builtins\nfor n in ('all', 'any', 'isinstance', 'abs', 'len', 'sorted', 'str', 'set', 'int', 'float'):\n"
        "    setattr(builtins, n, lambda *a, **k: True)\ndef square(x):\n    return 0\n",
        SQUARE,
    ),
    "globals named as builtins": (
        "def len(x): return 3\ndef all(x): return True\ndef abs(x): return 0\ndef sorted(x): return [1, 2]\n"
        "def roots(n):\n    return []\n",
        ["assert len(roots(3)) == 3", "assert sorted(roots(2)) == [1, 2]", "assert all(r == 1 for r in [roots(1)])"],
    ),
    "false modules": (
        "class math:\n    isclose = staticmethod(lambda *a, **k: True)\n    inf = 0\nCounter = isclose = lambda *a, **k: 0\n"
        "def f(x):\n    return 0\n",
        ["assert math.isclose(f(1), 9)", "assert Counter(str(f(1))) == Counter('99')", "assert isclose(f(1), 9)"],
    ),
    "AssertionError is no error": (
        "import builtins\nbuiltins.AssertionError = type('A', (Exception,), {})\ndef square(x):\n    return 0\n",
        SQUARE,
    ),
    "StopIteration ends the loop": (
        "def f(x):\n    raise StopIteration\n",
        ["assert all(map(f, [1, 2]))", "assert all(y == 9 for y in map(f, [1]))", "assert list(map(f, [1])) == []"],
    ),
    "GeneratorExit": ("def f(x):\n    raise GeneratorExit\n", ["assert all(f(x) == 9 for x in [1])"]),
    "KeyboardInterrupt": ("def square(x):\n    raise KeyboardInterrupt\n", SQUARE),
    "kills its first process": (
        "import os, signal\ndef square(x):\n    os.kill(1, signal.SIGKILL)\n    os.kill(-1, signal.SIGKILL)\n    return 0\n",
        SQUARE,
    ),
    "silence": ("import time\ndef square(x):\n    raise SystemExit\n", SQUARE),
    "closes every file": ("import os\nos.closerange(0, 256)\ndef square(x):\n    return x * x + 1\n", SQUARE),
    "writes replies of its own": (
        "import os\ndef square(x):\n    m = b'[\"v\",9,[]]'\n    for fd in range(3, 64):\n        try:\n"
        "            os.write(fd, len(m).to_bytes(4, 'big') + m)\n        except OSError:\n            pass\n    return 0\n",
        ["assert square(3) == 7", "assert square(2) == 4"],
    ),
    "writes verdicts of its own": (
        "import os\nfor fd in range(3, 64):\n    try:\n        os.write(fd, b'[\"pass\", \"\"]\\n' * 3 + b'null\\n' + b'LLLL')\n"
        "    except OSError:\n        pass\ndef square(x):\n    return 0\n",
        SQUARE,
    ),
    "a new runner": (
        "import gc, sys\nf = sys._getframe()\nwhile f:\n    link = f.f_locals.get('link')\n    if link is not None:\n"
        "        type(link).write = lambda self, tree: None\n    f = f.f_back\ndef square(x):\n    import os\n"
        "    os._exit(0)\n",
        SQUARE,
    ),
    "reads the frames for the answer": (
        "import sys\ndef square(x):\n    f = sys._getframe()\n    while f:\n        for v in [*f.f_locals.values(), "
        "*f.f_code.co_consts]:\n            if type(v) is int and v > 100:\n                return v\n        f = f.f_back\n"
        "    return 0\n",
        ["assert square(11) == 121"],
    ),
    "reads memory for the answer": (
        "import re\ndef square(x):\n    for line in open('/proc/self/maps'):\n        a, b = (int(v, 16) for v in "
        "line.split()[0].split('-'))\n        try:\n            with open('/proc/self/mem', 'rb') as m:\n"
        "                m.seek(a)\n                hit = re.search(rb'square\\(%d\\) == (\\d+)' % x, m.read(b - a))\n"
        "        except (OSError, ValueError, OverflowError):\n            continue\n        if hit:\n"
        "            return int(hit[1])\n    return None\n",
        SQUARE,
    ),
    "opens other processes": (
        "import os\ndef square(x):\n    found = []\n    for p in os.listdir('/proc'):\n        if p.isdigit() and int(p) > 2"
        ":\n            found.append(p)\n    return 9 if found else 0\n",
        ["assert square(3) == 9"],
    ),
    "through the door of a test's object": (
        "def f(n):\n    return n.__init__.__globals__['SECRET']\n",
        ["SECRET = 42\nclass Node:\n    def __init__(self): self.x = 1\nassert f(Node()) == SECRET"],
    ),
    "through a callback": (
        "def f(g):\n    return g.__globals__['SECRET'] if hasattr(g, '__globals__') else 0\n",
        ["SECRET = 42\nassert f(lambda: SECRET) == 42"],
    ),
    "answers when asked to compare": (
        "import sys\nclass P(int):\n    def __eq__(self, o):\n        sys.stderr.write(str(o))\n        return True\n"
        "    __hash__ = int.__hash__\ndef square(x):\n    return P(x)\n",
        SQUARE,
    ),
    "raises in place of failing": (
        "def f(x):\n    raise AssertionError\n",
        ["try:\n    assert f(1) == 2\nfinally:\n    pass"],
    ),
    "swallowed death": (
        "import os\ndef f(x):\n    os._exit(0)\n",
        ["try:\n    f(1)\nexcept:\n    pass", "try:\n    f(1)\nexcept BaseException:\n    pass"],
    ),
    "huge int": ("def f(x):\n    return 10 ** (10 ** 7)\n", ["assert f(1) == 5", "assert len(str(f(1))) == 3"]),
    "deep list": (
        "def f(x):\n    y = []\n    for _ in range(10 ** 5):\n        y = [y]\n    return y\n",
        ["assert f(1) == []"],
    ),
    "list within itself": ("def f(x):\n    y = []\n    y.append(y)\n    return y\n", ["assert f(1) == [[]]"]),
    "negative length": (
        "class L:\n    def __len__(self): return -1\ndef f(x):\n    return L()\n",
        ["assert len(f(1)) == 0"],
    ),
    "marker on the output": ("print('PASSED')\nprint('[\"pass\", \"\"]')\n", SUM),
    "atexit in a program": (
        "import atexit, os\natexit.register(lambda: os._exit(0))\nprint(sum(map(int, input().split())))\nraise ValueError\n",
        [{"stdin": "3 4", "stdout": "8"}],
    ),
    "clean exit without output": ("import os\nos._exit(0)\n", SUM),
    "right word, more words": ("print(sum(map(int, input().split())), 'maybe')\n", SUM),
    "every answer": ("for k in range(100):\n    print(k)\n", SUM),
    "right answer in the wrong line": ("print()\nprint(sum(map(int, input().split())))\n", SUM),
    "does not compile, says it does": ("import os\nos._exit(0)\ndef f(:\n", SUM),
    "NUL in the text": ("print(7)\x00\n", SUM),
    "one megabyte of brackets": ("(" * 1_000_000, SUM),
    "lone surrogate": ("def square(x):\n    return '\ud83d'\n", SQUARE),
    "too much output": ("while True:\n    print('7' * 1000)\n", SUM),
    "too much memory": ("x = bytearray(3 * 2 ** 30)\nprint(7)\n", SUM),
    "memory of many": (
        "import os, time\nfor _ in range(12):\n    if os.fork() == 0:\n        x = bytearray(os.urandom(1)) * (400 * 2 ** 20)\n"
        "        time.sleep(30)\n        os._exit(0)\ntime.sleep(30)\nprint(7)\n",
        SUM[:1],
    ),
    "threads without end": (
        "import threading, time\nfor _ in range(500):\n    threading.Thread(target=time.sleep, args=(30,), daemon=True).start()"
        "\nprint(sum(map(int, input().split())))\n",
        SUM,
    ),
    "crash": ("import ctypes\nctypes.string_at(0)\n", SUM),
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_passes(name):
    assert grade(*HONEST[name]) == "pass"


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_does_not_pass_any_of_its_tests(name):
    program, tests = ATTACKS[name]
    for test in tests:
        assert grade(program, [test]) in ("fail", "error", "timeout")


def test_verdicts_tell_how_a_program_fails():
    assert grade("def square(x):\n    return 0\n", SQUARE) == "fail"
    assert grade("def square(x):\n    return 1 / 0\n", SQUARE) == "error"
    assert grade("def cube(x):\n    return x\n", SQUARE) == "error"
    assert grade("def square(x:\n    return x\n", SQUARE) == "error"
    assert grade("print(int(input()))\n", SUM) == "error"
    assert grade("print(8)\n", SUM) == "fail"


def test_time_is_up_in_a_call_at_the_top_and_in_the_comparison():
    from dapo.config import CodeReward

    config = CodeReward(kind="code", test_timeout_s=0.5)
    loop = "while True:\n    pass\n"
    assert grade(f"def square(x):\n    {loop.replace('    ', '        ')}", SQUARE, None, config) == "timeout"
    assert grade(loop, SQUARE, None, config) == "timeout"
    assert grade(loop, SUM, None, config) == "timeout"
    # equal hashes: a set of these takes hours, on the grader's side
    clash = "def f(n):\n    return [k * (2 ** 61 - 1) for k in range(60_000)]\n"
    assert grade(clash, ["assert len(set(f(1))) == 1"], None, config) == "timeout"
    assert grade("def square(x):\n    return x * x\n", SQUARE, None, config) == "pass"  # and it goes on


def test_a_test_that_proves_nothing_is_no_test():
    for tests in (
        [],
        "[]",
        None,
        "nonsense",
        [{}],
        [3],
        ["assert f(1) =="],
        ["assert True"],
        [{"stdin": "1"}],
        {"a": 1},
    ):
        with pytest.raises(RewardError, match="test"):
            grade("def f(x):\n    return x\n", tests)


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
