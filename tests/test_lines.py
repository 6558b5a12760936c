"""The ratchet on lines of code: falls by itself, rises only with a decision."""

import ast
import importlib.util
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("lines", Path(__file__).parents[1] / "scripts" / "lines.py")
assert SPEC is not None and SPEC.loader is not None
ratchet = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(ratchet)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """3 lines in src/dapo/a, 2 in src/dapo/b, 1 in tests."""
    for name, lines in {"src/dapo/a/x.py": 3, "src/dapo/b/y.js": 2, "tests/t.py": 1, "tests/data.txt": 9}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("line\n" * lines)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/lines.txt").write_text("3 src/dapo/a\n2 src/dapo/b\n1 tests\n")
    return tmp_path


def record(tree: Path) -> dict[str, int]:
    return dict(ratchet.read(tree / "scripts/lines.txt"))


def test_one_line_more_is_refused_and_its_folder_named(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "src/dapo/b/y.js").write_text("line\n" * 3)
    assert ratchet.main(tree, []) == 1
    assert "src has 6 lines of code, 5 are recorded (src/dapo/b +1)" in capsys.readouterr().err
    assert record(tree)["src/dapo/b"] == 2


def test_fewer_lines_are_the_new_bar(tree: Path) -> None:
    (tree / "src/dapo/a/x.py").write_text("line\n")
    assert ratchet.main(tree, []) == 0
    assert record(tree) == {"src/dapo/a": 1, "src/dapo/b": 2, "tests": 1}
    (tree / "src/dapo/a/x.py").write_text("line\n" * 2)
    assert ratchet.main(tree, []) == 1


def test_lines_may_move_between_folders(tree: Path) -> None:
    (tree / "src/dapo/a/x.py").write_text("line\n")
    (tree / "src/dapo/b/y.js").write_text("line\n" * 4)
    assert ratchet.main(tree, []) == 0
    assert record(tree) == {"src/dapo/a": 1, "src/dapo/b": 4, "tests": 1}


def test_a_decision_that_is_there_raises_it(tree: Path) -> None:
    (tree / "src/dapo/a/x.py").write_text("line\n" * 7)
    assert ratchet.main(tree, ["--raise", "docs/decisions/0099-none.md"]) == 2
    (tree / "docs/decisions").mkdir(parents=True)
    (tree / "docs/decisions/0099-why.md").write_text("because\n")
    assert ratchet.main(tree, ["--raise", "docs/decisions/0099-why.md"]) == 0
    assert record(tree)["src/dapo/a"] == 7


def test_functions_have_at_most_60_lines_and_files_400() -> None:
    long = []
    for path in sorted((Path(__file__).parents[1] / "src").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        long += [path.name] if len(source.splitlines()) > 400 else []
        functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        long += [f"{path.name}: {f.name}" for f in functions if (f.end_lineno or 0) - f.lineno >= 60]
    assert long == ["attention_kernel.py: _attend"]  # a Triton kernel
