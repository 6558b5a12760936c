"""Both benchmarks of rewards one after the other: ``reward_math.py``, then ``reward_code.py``, with their defaults.

usage: python bench/reward.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name in ("reward_math.py", "reward_code.py"):
        print(f"== {name}", flush=True)
        subprocess.run([sys.executable, str(Path(__file__).with_name(name))], check=True)
