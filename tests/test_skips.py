"""What a session says of its skips, which of them fail it, and the time limit of each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from skips import SkipReport

EXPECTED = """
import pytest

@pytest.mark.skip(reason="needs a CUDA device")
def test_expected(): ...

def test_passes(): ...
"""
UNEXPECTED = "import pytest\n\ndef test_odd(): pytest.skip('no chromium')\n"
NOT_INSTALLED = "import pytest\n\npytest.importorskip('no_such_package')\n\ndef test_never(): ...\n"


@pytest.mark.parametrize(
    ("code", "fails", "code_of_exit", "said"),
    [
        (EXPECTED, True, 0, "not tested here: 1 skipped: needs a CUDA device\n"),
        (UNEXPECTED, False, 0, "not tested here: 1 skipped: no chromium\n"),
        (UNEXPECTED, True, 1, "not tested here: 1 skipped: no chromium; CI does not expect this, so it fails\n"),
        (NOT_INSTALLED, True, 1, "'no_such_package'; CI does not expect this, so it fails\n"),
    ],
    ids=["expected", "on a laptop", "in CI", "a whole file in CI"],
)
def test_an_unexpected_skip_is_said_and_fails_where_it_must(
    code: str, fails: bool, code_of_exit: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"{tmp_path.name}_a.py").write_text(code)  # names that no other session in this process has loaded
    (tmp_path / f"{tmp_path.name}_b.py").write_text("def test_passes(): ...\n")
    without = [
        word for name in ("cacheprovider", "xdist", "timeout", "hypothesispytest") for word in ("-p", f"no:{name}")
    ]
    words = ["-q", "--import-mode=importlib", "--rootdir", str(tmp_path), *without, str(tmp_path)]
    found = pytest.main(words, [SkipReport(fails)])
    assert found == code_of_exit
    assert said in capsys.readouterr().out


def test_every_test_has_a_time_limit(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> None:
    assert pytestconfig.pluginmanager.hasplugin("timeout")
    assert 0 < float(pytestconfig.getini("timeout")) <= 300
    limits = [item.get_closest_marker("timeout") for item in request.session.items]
    assert all(0 < limit.args[0] <= 90 * 60 for limit in limits if limit)
