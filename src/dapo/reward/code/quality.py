"""The parts of the code reward beside its tests, from 0 to 1: style, and efficiency relative to the reference."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

from dapo.errors import RewardError, install
from dapo.reward.code.program import Usage

RULES = "E,F,W,B,C4,SIM,UP"
"""Families of ruff's rules."""
_LINE_LENGTH = 120
_LINT_S = 20.0

TIME_ALLOWANCE = 1.25
"""A program is as good as the reference up to this multiple of its processor time, plus ``TIME_FLOOR_S``."""
TIME_FLOOR_S = 0.05
"""Variation of start-up times."""
MEMORY_ALLOWANCE = 1.1
MEMORY_FLOOR_BYTES = 8 * 2**20


def find_ruff() -> str:
    """The linter. Raises RewardError: it is not installed."""
    beside = Path(sys.executable).with_name("ruff")
    found = str(beside) if beside.exists() else shutil.which("ruff")
    if found is None:
        raise RewardError(f"the part `style` of the code reward needs ruff: {install('code')}")
    return found


def style(program: str) -> float:
    """1 - (findings / statements), at least 0; 0 for what is not Python. Constants that stand alone and ``pass`` are no
    statements here, so that they do not dilute the findings. Comments that silence the linter have no effect.
    Raises OSError, TimeoutError: the linter fails."""
    statements = _statements(program)
    if not statements:
        return 0.0
    options = ["--isolated", "--no-cache", "--ignore-noqa", "--output-format", "json", "--exit-zero"]
    options += ["--select", RULES, "--line-length", str(_LINE_LENGTH), "--stdin-filename", "solution.py", "-"]
    try:
        command, text = [find_ruff(), "check", *options], program.encode("utf-8", "replace")
        done = subprocess.run(command, input=text, capture_output=True, timeout=_LINT_S, cwd="/", env={}, check=False)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"ruff took longer than {_LINT_S:g} s") from None
    if done.returncode != 0:
        raise OSError(f"ruff failed: {done.stderr.decode('utf-8', 'replace')[:200]}")
    findings = json.loads(done.stdout)
    if any(finding["code"] is None or finding["code"] == "invalid-syntax" for finding in findings):
        return 0.0
    return 1.0 - min(1.0, len(findings) / statements)


def _statements(program: str) -> int:
    try:
        nodes = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.stmt)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0
    idle = [isinstance(n, ast.Pass) or (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)) for n in nodes]
    return idle.count(False)


def efficiency(program: Usage, reference: Usage) -> float:
    """The mean of a time part and a memory part. Each is 1 up to an allowance, the reference's use with room for noise,
    and allowance / use beyond."""
    allowed_s = TIME_ALLOWANCE * reference.cpu_s + TIME_FLOOR_S
    allowed_bytes = MEMORY_ALLOWANCE * reference.memory_bytes + MEMORY_FLOOR_BYTES
    time_part = min(1.0, allowed_s / max(program.cpu_s, 1e-9))
    memory_part = min(1.0, allowed_bytes / max(program.memory_bytes, 1))
    return (time_part + memory_part) / 2
