"""``python -m conformance``: run the suite on a trainer, or write the table of docs/conformance.md.

usage: python -m conformance [--adapter dapo|trl|FILE.py:CLASS] [--only TEXT] [--json]
       python -m conformance --write docs/conformance.md

Exit code 0: no case failed (those that differ by a stated design, or are not offered, do not count); 1: some did;
2: the adapter cannot be loaded.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from pathlib import Path

from rich.console import Console

from conformance.cases import CASES
from conformance.contract import Adapter
from conformance.report import markdown, show
from conformance.run import Status, run_cases

SHIPPED = {"dapo": "conformance.adapters.dapo:DapoAdapter", "trl": "conformance.adapters.trl:TrlAdapter"}
START, END = "<!-- table: python -m conformance --write docs/conformance.md -->\n", "<!-- end of table -->\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--adapter", default="dapo", help="dapo, trl, or file.py:Class (default: dapo)")
    parser.add_argument("--only", default="", help="run cases whose id holds this text")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.add_argument("--write", type=Path, help="run both shipped adapters and put the table into this document")
    options = parser.parse_args(arguments)
    if options.write:
        options.write.write_text(with_table(options.write.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    try:
        adapter = load_adapter(options.adapter)
    except (ImportError, AttributeError, OSError, ValueError) as error:
        print(f"conformance: the adapter {options.adapter} cannot be loaded: {error}", file=sys.stderr)
        return 2
    cases = [case for case in CASES if options.only in case.id]
    if not cases:
        print(f"conformance: no case has {options.only!r} in its id", file=sys.stderr)
        return 2
    outcomes = run_cases(adapter, cases)
    if options.json:
        print(json.dumps({"trainer": adapter.name, "cases": [outcome.as_json() for outcome in outcomes]}, indent=1))
    else:
        show(adapter.name, outcomes, Console())
    return int(any(outcome.status is Status.FAIL for outcome in outcomes))


def load_adapter(name: str) -> Adapter:
    """``dapo``, ``trl`` or ``path/to/file.py:Class``.

    Raises:
        ValueError: neither, or not an Adapter.
        ImportError, AttributeError, OSError: the file or what it needs is not there.
    """
    module_name, _, class_name = SHIPPED.get(name, name).rpartition(":")
    if not module_name:
        raise ValueError(f"expected {', '.join(SHIPPED)} or file.py:Class")
    if module_name.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(module_name)
    found = getattr(module, class_name)
    if not (isinstance(found, type) and issubclass(found, Adapter)):
        raise ValueError(f"{class_name} is not a subclass of conformance.contract.Adapter")
    return found()


def with_table(document: str) -> str:
    """``document`` with the table between its two marks made anew."""
    before, _, rest = document.partition(START)
    _, _, after = rest.partition(END)
    adapters = [load_adapter(name) for name in SHIPPED]
    table = markdown({adapter.name: run_cases(adapter, CASES) for adapter in adapters})
    return f"{before}{START}\n{table}\n{END}{after}"


if __name__ == "__main__":
    sys.exit(main())
