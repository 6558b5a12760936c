"""The verdict on a program, as labelled cases have it."""

import threading
from functools import cache

from dapo.config import CodeReward
from dapo.errors import RewardError
from dapo.reward.code.grade import Grader
from dapo.reward.code.names import read_tests
from dapo.reward.code.program import SandboxFailed


def grade(solution, tests, entry_point=None, config=None):
    """``tests``: as in a row of data. Raises RewardError: they are not usable, or the sandbox does not work."""
    try:
        grader = _grader((config or CodeReward(kind="code")).model_dump_json(), threading.get_ident())
        return grader.grade(solution, read_tests(tests, entry_point), entry_point).outcome
    except (SandboxFailed, ValueError) as error:
        raise RewardError(f"the program cannot be graded: {error}") from None


@cache
def _grader(config, thread):
    grader = Grader(CodeReward.model_validate_json(config))
    grader.sandbox.check()
    return grader
