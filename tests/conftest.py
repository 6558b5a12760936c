"""Shared by all tests: helpers importable by name, one thread per test process, kernels interpreted on a CPU."""

import os
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]  # helpers; conformance
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, whichever test of a process needs it first
