"""Parquet and data sets of the datasets library: verl's layout, folders, splits, and what is wrong with them."""

import json
import sys

import pytest
from data_cases import draws, items, read, source

from dapo.config.data import names_a_data_set
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
    with pytest.raises(DataError, match=r"content: was "):
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
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed/rows.jsonl").write_text('{"prompt": "p", "answer": "1"}\n')
    (tmp_path / "mixed/notes.json").write_text('{"steps": [1, 2]}\n')
    with pytest.raises(DataError, match="mixed: the data set cannot be loaded: its files have different columns; name"):
        read(tmp_path / "mixed")
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
        with pytest.raises(DataError, match=rf"need the package {package}: pip install 'dapo-rl\[data\]'"):
            read(item)


# --- numbers ------------------------------------------------------------------------------------------------------


def typed(tmp_path, values, **schema):
    """The answers of a Parquet file with a column of this type."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.table({"prompt": [f"p{k}" for k in range(len(values))], "answer": pa.array(values, **schema)})
    pq.write_table(table, tmp_path / "typed.parquet")
    return tmp_path / "typed.parquet"


def test_a_whole_float_is_an_integer(tmp_path):
    path = typed(tmp_path, [2.0, 4.0, -3.0, -0.0, 0.5, 1e20, 1e22, 2.0**53])
    expected = ["2", "4", "-3", "0", "0.5", "100000000000000000000", "1e+22", "9007199254740992"]
    assert [row.answer for row in read(path)] == expected


def test_a_missing_answer_in_a_column_of_floats_is_a_bad_row(tmp_path):
    path = typed(tmp_path, [2.0, None, float("nan"), float("inf")])
    with pytest.raises(DataError) as caught:
        read(path)
    assert [line.partition(": ")[2] for line in str(caught.value).splitlines()] == [
        "'answer' is null, but this reward compares with it",
        "'answer' is nan, not a finite number, but this reward compares with it",
        "'answer' is inf, not a finite number",
    ]


def test_short_floats_and_decimals_are_written_as_they_print(tmp_path):
    import decimal

    pa = pytest.importorskip("pyarrow")
    assert [row.answer for row in read(typed(tmp_path, [0.1, 3.0, 2.5], type=pa.float32()))] == ["0.1", "3", "2.5"]
    exact = [decimal.Decimal(text) for text in ("2.00", "0.10", "-1200.00", "0.00", "123456789012345678.25")]
    answers = [row.answer for row in read(typed(tmp_path, exact, type=pa.decimal128(20, 2)))]
    assert answers == ["2", "0.1", "-1200", "0", "123456789012345678.25"]


def test_short_floats_within_structs_and_lists_are_as_they_print(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    short = pa.float32()
    point = pa.struct([("at", short), ("name", pa.string())])
    deep = pa.struct([("x", short), ("some", pa.list_(short)), ("points", pa.list_(point)), ("wide", pa.float64())])
    value = {"x": 0.1, "some": [0.1, None, 0.3], "points": [{"at": 0.7, "name": "p"}, None], "wide": 0.1}
    half = pa.array([[[0.1]]], pa.list_(pa.list_(pa.float16())))
    columns = {"reward_model": pa.array([{"ground_truth": 0.1}], pa.struct([("ground_truth", short)]))}
    columns |= {"prompt": ["p"], "extra_info": pa.array([value], deep), "nested": half, "gap": pa.array([None], deep)}
    pq.write_table(pa.table(columns), tmp_path / "deep.parquet")
    (row,) = read(tmp_path / "deep.parquet", answer_key="reward_model.ground_truth")
    assert row.answer == "0.1"
    assert row.meta["extra_info"] == value and row.meta["nested"] == [[0.1]] and row.meta["gap"] is None


def test_integers_with_a_gap_are_integers_from_every_kind_of_data(tmp_path):
    rows = [{"prompt": "a", "answer": 2.0}, {"prompt": "b", "answer": 12.0}]
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.csv").write_text("prompt,answer,level\na,2,1\nb,12.0,\n")
    saved = tmp_path / "saved"
    datasets.Dataset.from_list(rows).save_to_disk(str(saved))
    for item in (parquet(tmp_path, rows), folder, saved):
        assert [row.answer for row in read(item)] == ["2", "12"]


def test_parquet_and_data_sets_are_read_without_a_home(tmp_path, monkeypatch):
    rows = [{"prompt": "a", "answer": 2}]
    (file := tmp_path / "home").write_text("")  # below which nobody makes a folder
    for name in ("DAPO_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(file))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    path = parquet(folder, rows)
    for place in (file / "datasets", "~/datasets"):
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", place)
        assert [row.answer for row in read(path)] == [row.answer for row in read(folder)] == ["2"]
    assert sorted(found.name for found in tmp_path.iterdir()) == ["folder", "home"]
