"""Shared by all tests: helpers importable by name, one thread per test process."""

import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]  # helpers; conformance
torch.set_num_threads(1)
