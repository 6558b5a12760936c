"""What is set for the whole process."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import resource
from dapo.util.memory import keep_freed_memory
{call}
import torch
torch.set_num_threads(1)
for _ in range(20):  # until the heap is as large as it gets
    torch.ones(1 << 24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.ones(1 << 24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator is Linux's")
def test_freed_memory_is_used_again() -> None:
    """Twenty tensors of 64 MiB, one after the other: 16,384 fresh pages each, or next to none."""

    def faults(call: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", CODE.format(call=call)], capture_output=True, text=True, check=True, timeout=120
        )
        return int(done.stdout)

    without = faults("")
    if without < 20 * 1000:
        pytest.skip("this system gives fresh memory in large pages")
    assert faults("keep_freed_memory()") < without / 4


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator is Linux's")
def test_what_is_kept_beyond_what_is_used_is_given_back() -> None:
    code = """
from pathlib import Path
from dapo.util.memory import give_back_memory, keep_freed_memory
keep_freed_memory()
import torch
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
empty = resident()
tensors = [torch.ones(1 << 22) for _ in range(96)]  # 1.5 GiB
last = torch.ones(1 << 10)
del tensors
kept = resident()
give_back_memory()
print(kept - empty > 1 << 30, resident() - empty < 1 << 28)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["True", "True"]
