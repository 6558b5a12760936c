"""Lines of code per folder, which may fall but not rise: `make check` runs this.

usage: python scripts/lines.py                                  compare with scripts/lines.txt; write lower numbers down
       python scripts/lines.py --raise docs/decisions/0040-x.md  record higher ones; the decision says why

The bar is the sum of each tree (src, tests, bench, scripts), so that code may move between folders.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = Path("scripts/lines.txt")
TREES = {"src": 3, "tests": 2, "bench": 1, "scripts": 1}  # and how many parts of a path name its folder
CODE = {".py", ".js", ".css", ".html", ".jinja"}


def count(root: Path) -> dict[str, int]:
    """Lines of the code below ``root``, by folder."""
    lines: Counter[str] = Counter()
    for tree, depth in TREES.items():
        for path in (root / tree).rglob("*"):
            if path.suffix in CODE and path.is_file():
                folder = "/".join(path.relative_to(root).parent.parts[:depth])
                lines[folder] += len(path.read_bytes().splitlines())
    return dict(sorted(lines.items()))


def sums(lines: dict[str, int]) -> dict[str, int]:
    """Lines of each tree."""
    return {tree: sum(n for folder, n in lines.items() if folder.split("/")[0] == tree) for tree in TREES}


def read(path: Path) -> dict[str, int]:
    return {folder: int(number) for number, folder in map(str.split, path.read_text("utf-8").splitlines())}


def main(root: Path, args: list[str]) -> int:
    now, record = count(root), root / RECORD
    was = read(record)
    grown = [tree for tree, n in sums(now).items() if n > sums(was)[tree]]
    if args:
        if (
            args[0] != "--raise"
            or len(args) != 2
            or not args[1].startswith("docs/decisions/")
            or not (root / args[1]).is_file()
        ):
            print(f"usage: --raise DECISION, a file of docs/decisions; got {' '.join(args)}", file=sys.stderr)
            return 2
    elif grown:
        for tree in grown:
            folders = [f"{f} +{n - was.get(f, 0)}" for f, n in now.items() if f.startswith(tree) and n > was.get(f, 0)]
            lines = f"{tree} has {sums(now)[tree]} lines of code, {sums(was)[tree]} are recorded"
            print(f"make check: {lines} ({', '.join(folders)})", file=sys.stderr)
        print(
            "Make it smaller, or write down why it has to grow (docs/decisions/NNNN-title.md) and run\n"
            "python scripts/lines.py --raise docs/decisions/NNNN-title.md",
            file=sys.stderr,
        )
        return 1
    if now != was:
        record.write_text("".join(f"{n:6} {folder}\n" for folder, n in now.items()), encoding="utf-8")
        print(f"{RECORD}: {' '.join(f'{tree} {n}' for tree, n in sums(now).items())}; commit it with the change")
    return 0


if __name__ == "__main__":
    sys.exit(main(ROOT, sys.argv[1:]))
