"""Parquet and data sets of the datasets library: verl's layout, folders, splits, and what is wrong with them."""

import json
import sys

import pytest
from data_cases import draws, items, read, source

from dapo.data.files import names_a_data_set
from dapo.errors import DataError

datasets = pytest.importorskip("datasets")

VERL = [
    {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"What is {k} + 1?"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(k + 1), "style": "rule"},
        "extra_info": {"index": f"id-{k}", "score": float("nan") if k == 2 else 0.5},
    }
    for k in range(30)
]


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path_factory):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf"))


def parquet(folder, rows=VERL, name="train.parquet"):
    path = folder / name
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    return path


def test_parquet_in_the_layout_of_verl(tmp_path):
    path = parquet(tmp_path)
    rows = read(path)
    assert [row.text for row in rows] == [f"What is {k} + 1?" for k in range(30)]
    assert [row.answer for row in rows] == [str(k + 1) for k in range(30)]
    assert rows[1].meta["extra_info"] == {"index": "id-1", "score": 0.5}
    assert rows[2].meta["extra_info"]["score"] is None  # failures.md 69
    assert rows[4].place == f"{path}:row 5"
    json.dumps([row.meta for row in rows], allow_nan=False)
    found = source(path)
    assert sorted(draws(found, 30)) == list(range(30))


def test_a_parquet_file_that_changed_is_another_one(tmp_path):
    path = parquet(tmp_path, [{"prompt": "a", "answer": "1"}])
    first = source(path)
    parquet(tmp_path, [{"prompt": "b", "answer": "1"}])
    second = source(path)
    assert second.prompts[0].text == "b" and first.fingerprint != second.fingerprint
    with pytest.raises(DataError, match="content is another one"):
        second.load_state(first.state())


def test_bad_rows_of_parquet_are_named_by_row(tmp_path):
    path = parquet(
        tmp_path, [{"prompt": "a", "answer": "1"}, {"prompt": None, "answer": "2"}, {"prompt": "c", "answer": None}]
    )
    with pytest.raises(DataError) as caught:
        read(path)
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"{path}:row 2: ") and second.startswith(f"{path}:row 3: 'answer' is null")


@pytest.mark.parametrize("damage", ["text", "cut", "empty", "missing", "none"])
def test_broken_parquet_is_named(tmp_path, damage, capfd):
    path = tmp_path / "x.parquet"
    if damage == "none":
        datasets.Dataset.from_dict({"prompt": []}).to_parquet(str(path))
    elif damage != "missing":
        whole = parquet(tmp_path, name="whole.parquet").read_bytes()
        path.write_bytes({"text": b"hello", "cut": whole[: len(whole) // 2], "empty": b""}[damage])
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ") and len(str(caught.value).splitlines()) == 1
    assert "Traceback" not in capfd.readouterr().err


def test_saved_folders_and_folders_of_files(tmp_path):
    plain = datasets.Dataset.from_list([{"prompt": f"p{k}", "answer": str(k)} for k in range(5)])
    plain.save_to_disk(str(tmp_path / "one"))
    assert [row.text for row in read(tmp_path / "one")] == [f"p{k}" for k in range(5)]
    both = datasets.DatasetDict({"train": plain, "test": plain.select(range(2))})
    both.save_to_disk(str(tmp_path / "two"))
    assert len(read(tmp_path / "two")) == 5
    rows = read({"path": str(tmp_path / "two"), "split": "test"})
    assert len(rows) == 2 and rows[0].place == f"{tmp_path}/two (split=test):row 1"
    with pytest.raises(DataError, match=r"no split 'dev'; it has train, test"):
        read({"path": str(tmp_path / "two"), "split": "dev"})
    datasets.DatasetDict({"a": plain, "b": plain}).save_to_disk(str(tmp_path / "three"))
    with pytest.raises(DataError, match=r"name one with split: it has a, b"):
        read(tmp_path / "three")
    (tmp_path / "files").mkdir()
    parquet(tmp_path / "files", name="train-00000.parquet")
    assert len(read(tmp_path / "files")) == 30
    first, again = source(tmp_path / "one"), source(tmp_path / "one")
    again.load_state(first.state())


def test_what_names_a_data_set():
    named = {
        "openai/gsm8k": True,
        "gsm8k": False,
        "a/b/c": False,
        "data/train.jsonl": False,
        "data/train.jsonl.gz": False,
    }
    assert {name: names_a_data_set(items(name)[0]) for name in named} == named
    assert names_a_data_set(items({"path": "gsm8k", "split": "train"})[0])


def test_a_data_set_that_is_not_there_is_named():
    with pytest.raises(DataError, match=r"^nobody/nothing: the data set cannot be loaded: "):
        read("nobody/nothing")


def test_the_library_that_is_missing_is_named(tmp_path, monkeypatch):
    path = parquet(tmp_path)
    packed = tmp_path / "x.jsonl.zst"
    packed.write_bytes(b"")
    for module in ("datasets", "zstandard"):
        monkeypatch.setitem(sys.modules, module, None)
    for item, package in ((path, "datasets"), ("some/set", "datasets"), (packed, "zstandard")):
        with pytest.raises(DataError, match=rf"need the package {package}: pip install 'dapo\[data\]'"):
            read(item)
