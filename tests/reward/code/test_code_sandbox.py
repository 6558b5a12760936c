"""What a program sees and reaches from inside of the sandbox."""

import os
import resource
import sys
import time
from ast import literal_eval
from pathlib import Path

import pytest
from grading import grade

from dapo.config import CodeReward
from dapo.errors import RewardError
from dapo.reward.code import sandbox as module
from dapo.reward.code.border import Border
from dapo.reward.code.grade import Grader
from dapo.reward.code.names import read_tests
from dapo.reward.code.program import SandboxFailed
from dapo.reward.code.sandbox import Sandbox, SandboxLimits

CONFIG = CodeReward(kind="code", test_timeout_s=3.0)


def seen(expression, imports="os", config=CONFIG):
    """What ``expression`` is inside of the sandbox, as text."""
    grader = Grader(config)
    grader.sandbox.check()
    program = f"import {imports}\ndef see():\n    return str({expression})\n"
    with grader.sandbox.start(program.encode(), script=False) as started:
        assert started.load(5.0, (2**40, 1000)) == b"L"
        return Border(started.channel, 2**20).names(["see"])["see"]()


def test_no_capability_is_left_and_none_can_be_had():
    status = seen("open('/proc/self/status').read()")
    fields = dict(line.split(":\t") for line in status.splitlines() if ":\t" in line)
    assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == int(fields["CapAmb"], 16) == 0
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"
    assert "0" not in fields["Uid"].split()
    # a user namespace of its own would give them back
    new = "[ctypes.CDLL(None, use_errno=True).unshare(0x10000000), ctypes.get_errno()]"
    assert seen(new, "ctypes") == "[-1, 1]"


def test_nothing_of_the_machine_is_there():
    os.environ["SANDBOX_CANARY_SECRET"] = "1"
    assert set(literal_eval(seen("sorted(os.environ)"))) <= {
        *("LC_CTYPE", "MALLOC_ARENA_MAX", "PWD", "PYTHONINTMAXSTRDIGITS")
    }
    shown = {"dev", "etc", "lib", "lib32", "lib64", "packages", "proc", "tmp", "usr"}
    assert set(literal_eval(seen("os.listdir('/')"))) <= {*shown, Path(sys.base_prefix).parts[1]}
    assert seen("os.listdir('/tmp')") == "[]"
    assert seen(f"os.path.exists({str(Path(__file__).parent)!r})") == "False"
    assert seen("[p for p in os.listdir('/proc') if p.isdigit()]") == "['1', '2']"
    assert seen("os.uname().nodename") == "sandbox"
    assert seen("sorted(os.listdir('/dev'))") == "['null', 'shm', 'stdin', 'urandom', 'zero']"


def test_only_the_scratch_folder_can_be_written_to():
    attempt = "[[os.access(d, os.W_OK) for d in ('/', '/dev', '/etc', '/usr/lib', sys.prefix, '/tmp')]]"
    assert seen(attempt, "os, sys") == "[[False, False, False, False, False, True]]"


def test_there_is_no_network():
    assert seen("[line.split(':')[0].strip() for line in open('/proc/net/dev') if ':' in line]") == "['lo']"
    assert seen("socket.socket().connect_ex(('1.1.1.1', 80)) != 0", "socket") == "True"
    vsock = "import socket\ntry:\n    socket.socket(40, 1)\nexcept PermissionError:\n    print('refused')\n"
    assert grade(vsock, [{"stdin": "", "stdout": "refused"}]) == "pass"  # no namespace covers it


def test_memory_that_no_limit_counts_is_refused():
    program = "import os\ntry:\n    os.memfd_create('x')\nexcept PermissionError:\n    print('refused')\n"
    assert grade(program, [{"stdin": "", "stdout": "refused"}]) == "pass"


def test_limits_hold():
    config = CodeReward(kind="code", max_processes=8, scratch_mb=2, memory_mb=256, test_timeout_s=3.0)
    count = (
        "import os, time\nk = 0\ntry:\n    while os.fork():\n        k += 1\n    time.sleep(60)\n    os._exit(0)\n"
        "except OSError:\n    print(k)\n"
    )
    grader = Grader(config)
    for limit, program in {
        "7": count,  # and itself
        "2": "k = 0\ntry:\n    while True:\n        with open(f'{k}', 'wb') as f:\n"
        "            f.write(bytes(2 ** 20))\n        k += 1\nexcept OSError:\n    print(k)\n",
        "low": "try:\n    bytes(300 * 2 ** 20)\nexcept MemoryError:\n    print('low')\n",
    }.items():
        verdict = grader.grade(program, read_tests([{"stdin": "", "stdout": limit}], None))
        assert verdict.outcomes == ["pass"], (program, verdict)


def test_limits_hold_while_output_drips():
    drip = "import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n        x = b'1' * (70 * 2 ** 20)\n"
    drip += "        time.sleep(60)\nwhile True:\n    print(1, flush=True)\n    time.sleep(0.02)\n"
    grader = Grader(CodeReward(kind="code", memory_mb=128, test_timeout_s=20.0))
    verdict = grader.grade(drip, read_tests([{"stdin": "", "stdout": ""}], None))
    assert verdict.outcomes == ["error"]
    assert "memory" in verdict.detail


def test_files_without_content_are_counted():
    program = "k = 0\nwhile True:\n    open(str(k), 'w').close()\n    k += 1\n"
    verdict = Grader(CONFIG).grade(program, read_tests([{"stdin": "", "stdout": ""}], None))
    assert verdict.outcomes == ["error"]
    assert "too many files" in verdict.detail


def test_threads_up_to_the_limit_fit_into_the_memory():
    program = (
        "import threading, time\nfor _ in range(30):\n    threading.Thread(target=time.sleep, args=(0.3,)).start()\n"
    )
    assert grade(f"{program}print(threading.active_count())\n", [{"stdin": "", "stdout": "31"}]) == "pass"


def test_standard_input_has_a_name():
    for program in ("print(open('/dev/stdin').read())\n", "import fileinput\nprint(*fileinput.input())\n"):
        assert grade(program, [{"stdin": "7", "stdout": "7"}]) == "pass"


def test_nothing_outlives_a_program():
    def sleepers():
        return [p for p in Path("/proc").iterdir() if p.name.isdigit() and b"7654321" in _cmdline(p)]

    def _cmdline(path):
        try:
            return (path / "cmdline").read_bytes()
        except OSError:
            return b""

    escape = (
        "import os, subprocess, sys\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)', '7654321'])\n    os._exit(0)\n"
        "import time\ntime.sleep(0.5)\nprint('left')\n"
    )
    start = time.monotonic()
    assert grade(escape, [{"stdin": "", "stdout": "left"}]) == "pass"
    assert sleepers() == []
    assert time.monotonic() - start < 30
    assert (
        grade("import time\nprint('7654321')\ntime.sleep(60)\n", [{"stdin": "", "stdout": ""}], None, CONFIG)
        == "timeout"
    )
    assert sleepers() == []


def test_each_program_finds_a_fresh_scratch_folder():
    program = "import os\nprint(os.listdir('.'))\nopen('heapq.py', 'w').write('1')\n"
    assert grade(program, 2 * [{"stdin": "", "stdout": "[]"}]) == "pass"


def test_installed_packages_are_there_only_if_asked_for():
    program = "import numpy\ndef f(n):\n    return int(numpy.arange(n).sum())\n"
    assert grade(program, ["assert f(4) == 6"], None, CONFIG) == "error"
    for sandbox in ("bubblewrap", "none"):
        config = CodeReward(kind="code", packages=["numpy"], sandbox=sandbox)
        assert grade(program, ["assert f(4) == 6"], None, config) == "pass"
    with pytest.raises(RewardError, match="no_such_package"):
        grade(program, ["assert f(4) == 6"], None, CodeReward(kind="code", packages=["no_such_package"]))


def test_without_bubblewrap_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    with pytest.raises(RewardError, match="apt-get install bubblewrap"):
        Sandbox(SandboxLimits(2**30, 32, 2**26)).check()


def test_a_sandbox_that_does_not_start_is_the_users_affair_and_no_verdict(tmp_path, monkeypatch):
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    module._arguments.cache_clear()
    try:
        with pytest.raises(RewardError, match="No permissions to create new namespace"):
            Sandbox(SandboxLimits(2**30, 32, 2**26)).check()
        with pytest.raises(SandboxFailed, match="No permissions to create new namespace"):
            Grader(CONFIG).grade("print(7)\n", read_tests([{"stdin": "", "stdout": "7"}], None))
    finally:
        module._arguments.cache_clear()


def test_without_a_sandbox_programs_run_and_leave_no_folder():
    config = CodeReward(kind="code", sandbox="none", test_timeout_s=2.0)
    assert (
        grade("open('x', 'w').write('7')\nprint(open('x').read())\n", [{"stdin": "", "stdout": "7"}], None, config)
        == "pass"
    )
    assert grade("def f(x):\n    return x\n", ["assert f(1) == 1"], None, config) == "pass"
    hanging = "import os, time\nif os.fork() == 0:\n    time.sleep(60)\nprint(7)\n"
    assert grade(hanging, [{"stdin": "", "stdout": "7"}], None, config) == "pass"
    assert grade("while True:\n    pass\n", [{"stdin": "", "stdout": "7"}], None, config) == "timeout"


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_STACK)[1] != resource.RLIM_INFINITY, reason="the stack is bounded"
)
@pytest.mark.parametrize("limits", ["(-1, -1)", "(2**28, -1)", "(2**28, 2**28)", "(resource.RLIM_INFINITY,) * 2"])
def test_a_program_may_ask_for_more_stack(limits):
    asks = f"import resource, sys\nresource.setrlimit(resource.RLIMIT_STACK, {limits})\nsys.setrecursionlimit(10**6)\n"
    deep = "def depth(n):\n    return n and 1 + depth(n - 1)\n"
    program = f"{asks}{deep}print(depth(20000) + sum(map(int, input().split())))\n"
    assert grade(program, [{"stdin": "5 7\n", "stdout": "20012\n"}]) == "pass"


def test_more_stack_is_no_more_memory():
    asks = "from resource import *\nsetrlimit(RLIMIT_STACK, (getrlimit(RLIMIT_STACK)[1],) * 2)\n"
    program = f"{asks}try:\n    bytearray(2**33)\nexcept MemoryError:\n    print('low')\n"
    assert grade(program, [{"stdin": "", "stdout": "low\n"}]) == "pass"
