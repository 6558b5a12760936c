"""The tool that is built in: Python in the sandbox that the code reward has."""

from __future__ import annotations

import os
from functools import cache

from dapo.errors import UserError
from dapo.reward.code.program import Clock, OverLimit, SandboxFailed, TimeUp
from dapo.reward.code.sandbox import Sandbox, SandboxLimits

_MIB = 2**20
MEMORY, PROCESSES, SCRATCH, OUTPUT = 512 * _MIB, 16, 64 * _MIB, 100_000


class PythonTool:
    """An environment with one tool. The recipe's reward scores the last answer."""

    last_turn = "This is the last turn: no more programs are run. Write the answer."

    def python(self, code: str) -> str:
        """Run a Python program and return what it prints.

        Args:
            code: The program. Nothing of an earlier one is left.
        """  # the tool's schema is made of it
        return run_python(code)


def run_python(code: str, timeout_s: float = 10.0) -> str:
    """What a program prints, its last error too, in a sandbox without network or files of this machine. It is ended
    with all that it started after ``timeout_s`` seconds, or when whoever asked is gone.
    Raises RewardError: there is no sandbox on this machine."""
    source = code if "from __future__" in code else f"import sys; sys.stderr = sys.stdout\n{code}"
    output, why = bytearray(), ""
    try:
        with sandbox().start(source.encode("utf-8", "replace"), script=True) as program:
            sink, pipe = program.process.stdin, program.process.stdout
            assert sink is not None and pipe is not None
            sink.close()
            try:
                for _ in Clock(program, (MEMORY, PROCESSES)).ticks(timeout_s, [pipe.fileno()]):
                    part = os.read(pipe.fileno(), 65536)
                    output += part
                    if not part or len(output) > OUTPUT:
                        break
            except TimeUp:
                why = f"\nError: its time is up ({timeout_s:g} s)"
            except OverLimit as error:
                why = f"\nError: {error}"
            if not output and not why and program.is_malformed():
                why = "SyntaxError: the program does not compile"
    except SandboxFailed as error:
        raise UserError(f"the sandbox does not start: {error}") from None
    return (output[:OUTPUT].decode("utf-8", "replace") + why).strip() or "(no output)"


@cache
def sandbox() -> Sandbox:
    found = Sandbox(SandboxLimits(MEMORY, PROCESSES, SCRATCH))
    found.check()
    return found
