"""What the documents show is run as it stands there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dapo.config import build_config
from dapo.demo.task import make_model, make_tokenizer

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _blocks(language: str) -> list[Any]:
    """Fenced blocks of one language, with the place they stand at as test id."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text[: match.start()].count("\n") + 1
            found.append(pytest.param(match.group(1), id=f"{document.relative_to(ROOT)}:{line}"))
    return found


@pytest.mark.parametrize("code", _blocks("python"))
def test_python_blocks_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that holds what the demo leaves behind, with weights that were not warmed up."""
    tokenizer = make_tokenizer()
    folder = tmp_path / "runs/cpu-demo/model-before"
    make_model(0, len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "<document>", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("text", _blocks("yaml"))
def test_recipes_in_documents_are_valid(text: str) -> None:
    build_config(yaml.safe_load(text))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_links_and_files_that_are_named_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", text):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"
    # module paths in code type, such as `training/packing.py`, are looked up in the package and the repository
    for name in re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|yaml|md))(?::[^`]*)?`", text):
        places = [ROOT / "src/dapo" / name, ROOT / "src" / name, ROOT / name]
        assert any(place.exists() for place in places), f"{document.name} names {name}"


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda r: r.name)
def test_shipped_recipes_are_valid(recipe: Path) -> None:
    from dapo.config import load_config, warnings_for

    assert warnings_for(load_config(recipe)) == []


@pytest.mark.parametrize("page", ["configuration.md", "metrics.md"])
def test_reference_pages_are_what_the_code_says(page: str) -> None:
    spec = importlib.util.spec_from_file_location("make_docs", ROOT / "scripts/make_docs.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert (ROOT / "docs" / page).read_text(encoding="utf-8") == script.PAGES[page](), "run scripts/make_docs.py"
