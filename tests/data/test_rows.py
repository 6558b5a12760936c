"""Reading rows: what is accepted, and that every fault is named with file, line and reason."""

import gzip
import json
import string
from decimal import Decimal

import pytest
from data_cases import PLAIN, read, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dapo.config import DataConfig
from dapo.config.data import DataItem
from dapo.data.check import Measure, check_data
from dapo.data.rows import NO_ANSWER, Keys, check_row
from dapo.data.source import read_prompts
from dapo.errors import ConfigError, DataError


def errors(*files, **options):
    with pytest.raises(DataError) as caught:
        read(*files, **options)
    return str(caught.value).splitlines()


def test_numbers_are_accepted_as_the_text_they_are_written_as(tmp_path):  # failures.md 68
    written = ["4", '"6"', "4.0", "0.10", "-3", "1e5", "12345678901234567890123"]
    path = write(tmp_path, *(f'{{"prompt": "2+2?", "answer": {answer}}}' for answer in written))
    assert [row.answer for row in read(path)] == [answer.strip('"') for answer in written]
    assert type(read(path)[0].answer) is str


def test_byte_order_mark_empty_lines_and_crlf(tmp_path):
    path = write(
        tmp_path, b'\xef\xbb\xbf{"prompt": "a", "answer": "1"}\r', "", "   ", '{"prompt": "b", "answer": "2"}', ""
    )
    rows = read(path)
    assert [(row.prompt, row.answer, row.place) for row in rows] == [("a", "1", f"{path}:1"), ("b", "2", f"{path}:4")]


def test_gzip(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "a", "answer": "1"}\n'))
    assert read(path)[0].prompt == "a"
    path.write_bytes(gzip.compress(b'{"prompt": "a", "answer": "1"}\n')[:-12])
    assert str(path) in errors(path)[0]
    path.write_bytes(b'{"prompt": "a", "answer": "1"}\n')
    assert str(path) in errors(path)[0]


def test_extra_fields_are_kept_and_may_be_absent(tmp_path):  # failures.md 69
    path = write(
        tmp_path,
        '{"prompt": "a", "answer": "1", "level": 3, "x": [1.5, {"y": 2}], "z": null}',
        '{"prompt": "b", "answer": "2"}',
    )
    first, second = read(path)
    assert first.meta == {"level": 3, "x": [1.5, {"y": 2}], "z": None}
    assert type(first.meta["level"]) is int and type(first.meta["x"][0]) is float
    assert second.meta == {}


def test_chat_messages(tmp_path):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    path = write(
        tmp_path, json.dumps({"prompt": messages, "answer": "1"}), json.dumps({"prompt": messages[1:], "answer": "1"})
    )
    both, one = read(path)
    assert both.prompt == tuple(messages)
    assert both.text == "system: S\nuser: U"
    assert one.text == "U"


def test_other_keys_and_optional_answers(tmp_path):
    path = write(tmp_path, '{"question": "a"}', '{"question": "b", "gold": null}', '{"question": "c", "gold": 7}')
    rows = read(path, prompt_key="question", answer_key="gold", answer_required=False)
    assert [row.answer for row in rows] == [None, None, "7"]
    found = errors(path, prompt_key="question", answer_key="gold")
    assert len(found) == 2 and "no key 'gold'" in found[0] and "question" in found[0] and "null" in found[1]


BAD_ROWS = {
    '{"prompt": "2+2?", "ans': "cut off",
    '{"prompt": "2+2?", "answer": "4"': "cut off",
    '{"prompt": "2+2?", "answer": "4",}': "not valid JSON",
    "[1, 2]": "got a list",
    '"text"': "got text",
    "7": "got a number",
    "null": "got null",
    '{"prompts": "a", "answer": "1"}': "the keys are prompts, answer",
    '{"prompt": "a"}': "no key 'answer'",
    '{"prompt": "", "answer": "1"}': "is empty",
    '{"prompt": "  ", "answer": "1"}': "is empty",
    '{"prompt": [], "answer": "1"}': "empty list",
    '{"prompt": 5, "answer": "1"}': "got a number",
    '{"prompt": null, "answer": "1"}': "got null",
    '{"prompt": {"a": 1}, "answer": "1"}': "got an object",
    '{"prompt": ["a"], "answer": "1"}': "prompt[0] must be a message",
    '{"prompt": [{"role": "user"}], "answer": "1"}': "'content' must be text, got nothing",
    '{"prompt": [{"role": "user", "content": 5}], "answer": "1"}': "'content' must be text, got a number",
    '{"prompt": "a", "answer": true}': "got true or false",
    '{"prompt": "a", "answer": ["1"]}': "got a list",
    '{"prompt": "a", "answer": NaN}': "NaN is not valid JSON",
    '{"prompt": "a", "answer": "1", "x": Infinity}': "Infinity is not valid JSON",
    '{"prompt": "a", "answer": ""}': "is empty",
    '{"prompt": "\\ud800", "answer": "1"}': "surrogate",
    b'{"prompt": "\xff", "answer": "1"}': "not UTF-8",
    "[" * 100_000: "nested too deeply",
}


@pytest.mark.parametrize("line", BAD_ROWS, ids=[str(k) for k in range(len(BAD_ROWS))])
def test_bad_rows_name_file_line_and_reason(tmp_path, line):  # failures.md 68
    path = write(tmp_path, '{"prompt": "a", "answer": "1"}', line, '{"prompt": "b", "answer": "1"}')
    (found,) = errors(path)
    assert found.startswith(f"{path}:2: ") and BAD_ROWS[line] in found


def test_all_errors_of_all_files_in_one_pass(tmp_path):
    first = write(tmp_path, *(" " * k + "?" for k in range(15)), name="a.jsonl")
    good = '{"prompt": "a", "answer": "1"}'
    second = write(tmp_path, *(line for k in range(15) for line in (good, " " * k + '{"a"?')), name="b.jsonl")
    found = errors(first, second, tmp_path / "none.jsonl")
    assert len(found) == 21
    assert "none.jsonl" in found[0]
    assert found[1].startswith(f"{first}:1:") and found[16].startswith(f"{second}:2:")
    assert "31 errors in all" in found[20]


def test_a_reason_that_rows_have_in_common_is_told_once_with_their_number_and_the_first_places(tmp_path):
    lines = ['{"question": "1+1="}'] * 1000 + ['{"prompt": ""}', '{"question": "1+1="}', '{"prompt": ""}']
    file = write(tmp_path, *lines)
    places = f"{file}:2, {file}:3, {file}:4, ..."
    expected = [
        f"{file}:1: no key 'prompt' (data.prompt_key); the keys are question (1,000 more with this: {places})",
        f"{file}:1001: 'prompt' is empty (1 more with this: {file}:1003)",
    ]
    assert errors(file) == expected
    checked = check_data([DataItem(path=str(file))], [], DataConfig(), Measure()).train[0]
    assert (checked.bad, checked.faults) == (1003, expected)


def test_bad_files(tmp_path):
    empty = write(tmp_path, "", "", name="empty.jsonl")
    assert errors(empty, tmp_path / "none.jsonl") == [
        f"{empty}: the file has no rows",
        f"{tmp_path}/none.jsonl: no such file",
    ]
    (folder := tmp_path / "folder").mkdir()
    assert errors(folder)[0].startswith(f"{folder}: ")
    with pytest.raises(DataError, match="no data files"):
        read()


def python_rows(rows, **options):
    return read_prompts(DataConfig(template="plain"), rows, PLAIN, **options)


def test_numbers_of_rows_from_python_become_text_as_whole_numbers_do():
    import numpy as np

    values = [2.0, np.float64(12.0), np.float32(0.1), np.int64(7), -0.0, 0.25, 1e-7, Decimal("3.50"), 10**30]
    rows = [{"prompt": "a", "answer": value} for value in values]
    expected = ["2", "12", "0.1", "7", "0", "0.25", "1e-07", "3.5", str(10**30)]
    assert [prompt.answer for prompt in python_rows(rows)] == expected
    for value in (True, np.bool_(False), float("inf"), Decimal("NaN")):
        with pytest.raises(DataError, match="prompts"):
            python_rows([{"prompt": "a", "answer": value}])


def test_rows_from_python_are_checked_alike():
    rows = [{"prompt": "a", "answer": 4, "level": 1}, {"prompt": "", "answer": "1"}, {"answer": 1}]
    with pytest.raises(DataError) as caught:
        python_rows(rows)
    first, second = str(caught.value).splitlines()
    assert first.startswith("prompts[1]: ") and second.startswith("prompts[2]: ")
    (prompt,) = python_rows(rows[:1])
    assert (prompt.answer, prompt.meta) == ("4", {"level": 1})
    with pytest.raises(DataError, match="no rows"):
        python_rows([])
    with pytest.raises(DataError, match="not a finite number"):
        python_rows([{"prompt": "a", "answer": float("nan")}])


def test_what_data_frames_hold_becomes_plain():  # failures.md 69
    import datetime

    import numpy as np

    messages = np.array([{"role": "user", "content": "a"}])
    (prompt,) = python_rows(
        [
            {
                "prompt": messages,
                "answer": np.int64(4),
                "extra": float("nan"),
                "day": datetime.date(2024, 2, 3),
                "list": np.array([1.5, float("inf")]),
                "deep": {"x": np.float32(0.5)},
            }
        ]
    )
    assert (prompt.text, prompt.answer) == ("a", "4")
    assert prompt.meta == {"extra": None, "day": "2024-02-03", "list": [1.5, None], "deep": {"x": 0.5}}
    json.dumps(prompt.meta, allow_nan=False)
    missing = [{"prompt": "a", "answer": float("nan")}, {"prompt": "a", "answer": None}, {"prompt": "a"}]
    assert [p.answer for p in python_rows(missing, answer_required=False)] == [None] * 3


def test_dotted_keys_and_the_layout_of_verl(tmp_path):
    row = {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": "2+2?"}],
        "reward_model": {"ground_truth": "4", "style": "rule"},
        "extra_info": {"index": 0},
    }
    path = write(tmp_path, json.dumps(row), json.dumps(row | {"answer": "own"}), json.dumps({"a.b": "x", "answer": 1}))
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:3: no key 'prompt'")
    path = write(tmp_path, json.dumps(row), json.dumps(row | {"answer": "own"}))
    first, second = read(path)
    assert (first.text, first.answer, second.answer) == ("2+2?", "4", "own")
    assert first.meta["reward_model"] == {"ground_truth": "4", "style": "rule"}
    assert read(path, answer_key="extra_info.index")[0].answer == "0"
    dotted = write(tmp_path, '{"a.b": "plain", "a": {"b": "deep"}, "answer": 1}', name="dots.jsonl")
    assert read(dotted, prompt_key="a.b")[0].text == "plain"
    with pytest.raises(DataError, match=r"dots.jsonl:1: no key 'a\.c'"):
        read(dotted, prompt_key="a.c")


def test_an_answer_that_is_the_prompt_is_refused(tmp_path):
    path = write(tmp_path, '{"prompt": "a", "answer": "1"}')
    with pytest.raises(ConfigError, match="the same key"):
        read({"path": str(path), "answer_key": "prompt"})


GOOD = b'{"prompt": "7*3+4-5=", "answer": "0", "level": [1, 2.5, null, {"a": "\\u00e9"}]}'
NOISE = st.binary(max_size=4) | st.text(string.printable, max_size=4).map(str.encode)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, len(GOOD)), cut=st.integers(0, 12), noise=NOISE)
def test_mangled_lines_are_read_or_named(tmp_path, at, cut, noise):
    line = (GOOD[:at] + noise + GOOD[at + cut :]).replace(b"\n", b" ")
    path = write(tmp_path, GOOD, line, GOOD)
    try:
        value = json.loads(line, parse_constant=lambda name: 1 / 0)
        valid = isinstance(value, dict) and isinstance(value["prompt"], str) and value["prompt"].strip() != ""
        valid = valid and isinstance(value["answer"], str) and value["answer"].strip() != ""
        valid = valid or (isinstance(value["answer"], int | float) and not isinstance(value["answer"], bool))
        "".join([value["prompt"], str(value["answer"])]).encode()
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        valid = False
    if valid and line.isascii():
        assert len(read(path)) == 3
    elif line.strip():
        try:
            read(path)
        except DataError as error:
            assert all(text.startswith(f"{path}:") for text in str(error).splitlines())
            assert f"{path}:2: " in str(error)
        else:
            assert not line.isascii()  # what is not ASCII may well be good; all else that is bad was refused


@pytest.mark.parametrize(
    "answer",
    [
        *(
            "proof",
            "Proof.",
            "notfound",
            "not found",
            "None",
            "N/A",
            "NA",
            "n.a.",
            "nan",
            "NaN",
            "null",
            "nil",
            "?",
            "-",
        ),
        *("See solution", "see the proof", "Not given", "not_provided", "No answer", "missing", "TBD", "..."),
        *(r"\text{None}", r"\boxed{\text{N/A}}", "[none]", "**proof**", "--", "\u2014", "unknown"),
    ],
)
def test_an_answer_that_only_says_there_is_none_is_told_where_the_reward_compares_with_it(answer):
    row = check_row({"prompt": "p", "answer": answer}, Keys(), "")
    assert list(row.doubts(Keys())) == [(NO_ANSWER, f"answer is {answer!r}")]
    assert list(row.doubts(Keys(answer_required=None))) != []
    assert list(row.doubts(Keys(answer_required=False))) == []


@pytest.mark.parametrize(
    "answer",
    [
        *(
            "0",
            "-1",
            "Na",
            "no",
            "No solution",
            "undefined",
            "DNE",
            r"\emptyset",
            "\u2205",
            "\u221e",
            "x-?",
            "A",
            "+",
            "<",
        ),
        *("none of the above", "proof by induction on n", "nano", "tan", "a null set", "-x", r"\text{even}", "=", "{}"),
    ],
)
def test_an_answer_that_may_be_meant_is_none_of_these(answer):
    assert list(check_row({"prompt": "p", "answer": answer}, Keys(), "").doubts(Keys())) == []
