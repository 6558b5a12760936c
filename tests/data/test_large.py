"""Files of many rows: started without parsing them, and in little memory."""

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from data_cases import draws, items
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import dapo.data.parts
import dapo.data.text
from dapo.config import DataConfig
from dapo.data.parts import Rows, open_parts
from dapo.data.rows import parse_json
from dapo.data.source import PromptSource, load_prompts
from dapo.data.template import PromptTemplate

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "math"


def many(path, count):
    with path.open("w") as file:
        for start in range(0, count, 10_000):
            lines = (
                f'{{"prompt": "What is {k} plus one?", "answer": {k + 1}}}\n' for k in range(start, start + 10_000)
            )
            file.write("".join(lines))
    return path


def words(path) -> PromptSource:
    """To train on, with a tokenizer that is quick."""
    core = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    data = DataConfig(template="plain")
    return load_prompts(data, [str(path)], PromptTemplate(data, PreTrainedTokenizerFast(tokenizer_object=core)))


def test_rows_beyond_the_first_are_not_parsed_at_the_start(tmp_path, monkeypatch):
    path = many(tmp_path / "rows.jsonl", 300_000)
    monkeypatch.setattr(dapo.data.parts, "CHECKED_ROWS", 2000)
    parsed = []
    monkeypatch.setattr(dapo.data.text, "parse_json", lambda data: parsed.append(1) or parse_json(data))
    words(path)  # what is imported and made once
    parsed.clear()
    tracemalloc.start()
    found = words(path)
    rows = draws(found, 500)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.report.rows == 300_000 and len(set(rows)) == 500 and max(rows) > 200_000
    assert len(parsed) == 2500
    assert held < 8e6, f"{held / 1e6:.1f} MB held"  # the list of rows alone would take more
    assert peak < 24e6, f"{peak / 1e6:.1f} MB at most"
    assert json.loads(json.dumps(found.state()))["positions"] == [[0, 500]]


TEN_MILLION = """
import resource, sys
from data_cases import draws, source
small, large = sys.argv[1:]
draws(source(small), 100)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = source(large)
rows = draws(found, 20_000)
print(len(set(rows)), found.report.rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.nightly
def test_ten_million_rows_in_constant_memory(tmp_path):
    small, large = many(tmp_path / "small.jsonl", 20_000), many(tmp_path / "large.jsonl", 10_000_000)
    for _ in range(2):  # without the index, and with it
        done = subprocess.run(
            [sys.executable, "-c", TEN_MILLION, str(small), str(large)],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
        )
        different, rows, grown = map(int, done.stdout.split())
        assert (different, rows) == (20_000, 10_000_000)
        assert grown * (1 if sys.platform == "darwin" else 1024) < 80e6


@pytest.mark.shared
def test_every_shared_file_loads():
    files = sorted(SHARED.glob("*/*.jsonl*"))
    assert len(files) == 18
    for path in files:
        rows = Rows(open_parts(DataConfig(), items(path), answer_required=True)[0])
        assert len(rows) >= 30
        for number in range(len(rows)):
            assert rows[number].answer and rows[number].text.strip()
