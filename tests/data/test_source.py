"""The prompt source: length filter, identity, order, position, mixtures, policy for bad rows, control experiment."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
from data_cases import PLAIN, draws, numbered, read, source, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import CHAT, char_tokenizer

import dapo.data.parts
import dapo.data.source
from dapo.config import DataConfig
from dapo.data.rows import NO_ANSWER, SHOWN_FAULTS
from dapo.data.source import DataReport, load_prompts, read_prompts
from dapo.data.template import PromptTemplate
from dapo.errors import DataError


def texts(prompts, answers=None):
    return [{"prompt": p, "answer": a} for p, a in zip(prompts, answers or range(len(prompts)), strict=True)]


def count_up(size):
    return texts([f"p{k}" for k in range(size)])


@pytest.fixture
def short_head(monkeypatch):
    """Only the first 20 rows are checked at the start."""
    monkeypatch.setattr(dapo.data.parts, "CHECKED_ROWS", 20)
    monkeypatch.setattr(dapo.data.source, "CHECKED_ROWS", 20)


# --- length -------------------------------------------------------------------------------------------------------


def test_the_limit_counts_tokens_of_the_template_used():  # failures.md 30, 67
    chat = PromptTemplate(DataConfig(template="chat"), char_tokenizer(chat_template=CHAT))
    frame = len(chat.encode("x")) - 1
    rows = texts(["a" * 5, "a" * 6, [{"role": "user", "content": "b" * 6}], "c" * 7])
    found = load_prompts(DataConfig(max_prompt_length=frame + 6, shuffle=False), rows, chat)
    expected = [(0, "a" * 5, frame + 5), (1, "a" * 6, frame + 6), (2, "b" * 6, frame + 6)]
    assert [(p.row, p.text, len(p.token_ids)) for p in found.prompts] == expected
    assert found.report == DataReport(4, 4, too_long=1, duplicates=0, conflicts=0, longest=frame + 6)
    assert found.report.usable == len(found.prompts) == 3
    assert draws(found, 4) == [0, 1, 2, 0] and found.too_long == 1


def test_nothing_left_names_the_numbers():  # failures.md 67
    with pytest.raises(DataError, match=r"3 rows were read.*max_prompt_length=4.*shortest has 5"):
        source(texts(["a" * 5, "a" * 6, "a" * 7]), max_prompt_length=4)


def test_an_epoch_without_a_usable_row_ends_with_numbers(tmp_path, short_head):
    path = write(tmp_path, *[json.dumps({"prompt": "a" * 9, "answer": 1})] * 40)
    with pytest.raises(DataError, match=r"the first 20 rows were read, all of them longer"):
        source(path, max_prompt_length=8)
    other = numbered(tmp_path, 5, "good.jsonl")
    files = [{"path": str(other), "weight": 1}, {"path": str(path), "weight": 100}]
    found = source(*files, max_prompt_length=8)
    with pytest.raises(DataError, match=r"rows.jsonl: none of the 40 rows can be used: 80 times .*max_prompt_length=8"):
        draws(found, 100)


def test_evaluation_leaves_nothing_out_and_keeps_the_order(tmp_path):  # failures.md 67, 76
    path = write(tmp_path, *(json.dumps({"prompt": "x" * k, "answer": k, "level": k % 3}) for k in range(30, 0, -1)))
    data = DataConfig(template="plain", max_prompt_length=3, shuffle_answers=True)
    found = read_prompts(data, [str(path)], PLAIN, limit=20)
    assert [(p.row, len(p.token_ids), p.answer) for p in found] == [(k, 30 - k, str(30 - k)) for k in range(20)]
    assert max(len(p.token_ids) for p in found) == 30


# --- identity and order -------------------------------------------------------------------------------------------


def test_equal_prompts_are_rows_of_their_own_and_counted():  # failures.md 74
    found = source(texts(["2+2", "2+2", "2+2", "3+3"], ["4", "four", "4", "6"]), shuffle=False)
    assert draws(found, 4) == [0, 1, 2, 3]
    assert (found.report.duplicates, found.report.conflicts) == (2, 1)
    assert [p.answer for p in found.prompts] == ["4", "four", "4", "6"]


def test_order_of_the_files_when_shuffle_is_off():  # failures.md 77
    assert draws(source(count_up(4), shuffle=False), 10) == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_each_epoch_holds_every_row_once_in_another_order():  # failures.md 86
    found = source(count_up(50))
    epochs = [draws(found, 50) for _ in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert draws(source(count_up(50)), 50) == epochs[0]
    assert draws(source(count_up(50), seed=2), 50) != epochs[0]
    assert found.epoch == 3


def test_files_that_follow_one_another_are_shuffled_together(tmp_path):
    first, second = numbered(tmp_path, 30, "a.jsonl"), numbered(tmp_path, 20, "b.jsonl", start=30)
    found = source(first, second)
    order = draws(found, 50)
    assert sorted(order) == list(range(50)) and {k >= 30 for k in order[:25]} == {True, False}
    assert [found.prompts[k].text for k in (0, 29, 30, 49)] == ["p0", "p29", "p30", "p49"]
    assert len(found.prompts) == 50


# --- position -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [0, 1, 999, 1000, 1024, 2000, 2500])
def test_rows_after_resume_equal_the_uninterrupted_run(stop):  # failures.md 85
    whole = draws(source(count_up(1000)), 3000)
    first = source(count_up(1000))
    assert draws(first, stop) == whole[:stop]
    state = json.loads(json.dumps(first.state()))
    resumed = source(count_up(1000))
    draws(resumed, 7)  # an iterator that was used before the state came
    resumed.load_state(state)
    assert draws(resumed, 500) == whole[stop : stop + 500]


@st.composite
def several_files(draw):
    """Files of good, over-long and bad rows, each with a good one; weights or none."""
    kinds = st.lists(st.sampled_from(["good", "good", "long", "bad"]), min_size=1, max_size=12)
    files = [["good", *draw(kinds)] for _ in range(draw(st.integers(1, 3)))]
    weights = draw(st.none() | st.lists(st.floats(0.1, 10), min_size=len(files), max_size=len(files)))
    return files, weights


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    case=several_files(),
    stop=st.integers(0, 60),
    shuffle=st.booleans(),
    shuffle_answers=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_state_taken_anywhere_gives_the_same_continuation(tmp_path, case, stop, shuffle, shuffle_answers, seed):
    """Across epochs, with rows that are skipped, in mixtures; counts and epoch too."""
    files, weights = case
    lines = {
        "good": '{"prompt": "g%d", "answer": %d}',
        "long": '{"prompt": "%dlonglonglong", "answer": %d}',
        "bad": "{",
    }
    named = []
    for k, kinds in enumerate(files):
        path = write(
            tmp_path, *((lines[x] % (n, n) if x != "bad" else "{") for n, x in enumerate(kinds)), name=f"{k}.jsonl"
        )
        named.append({"path": str(path)} | ({"weight": weights[k]} if weights else {}))
    options = {"shuffle": shuffle, "shuffle_answers": shuffle_answers, "on_bad_row": "skip", "max_bad_rows": 1.0}

    def fresh():
        return source(*named, seed=seed, max_prompt_length=8, **options)

    def drawn(prompts, count):
        return [(p.row, p.text, p.answer) for p in (prompts.next() for _ in range(count))]

    whole = fresh()
    expected = drawn(whole, stop + 40)
    stopped = fresh()
    assert drawn(stopped, stop) == expected[:stop]
    resumed = fresh()
    resumed.load_state(json.loads(json.dumps(stopped.state())))
    assert drawn(resumed, 40) == expected[stop:]
    assert resumed.state() == whole.state() and resumed.epoch == whole.epoch
    if not weights:
        usable = [row for row, kind in enumerate(kind for kinds in files for kind in kinds) if kind == "good"]
        epoch = [row for row, _, _ in expected[: len(usable)]]
        assert sorted(epoch) == usable


def test_a_position_in_other_data_is_refused_with_what_changed(tmp_path):  # failures.md 89
    first, second = numbered(tmp_path, 10, "a.jsonl"), numbered(tmp_path, 10, "b.jsonl")
    state = source(first, second).state()
    source(first, second).load_state(state)
    with pytest.raises(
        DataError, match=r"(?s)data has changed.*1 a.jsonl: was {.*}, is now null.*1 b.jsonl: was null, is"
    ):
        source(second).load_state(state)
    numbered(tmp_path, 9, "b.jsonl")
    with pytest.raises(DataError, match=r"2 b.jsonl.rows: was 10, is now 9\n2 b.jsonl.content: was "):
        source(first, second).load_state(state)
    write(tmp_path, *second.read_text().replace("p3", "q3").splitlines(), name="b.jsonl")
    with pytest.raises(DataError, match="has changed"):
        source(first, second).load_state(state)
    moved = tmp_path / "moved"
    moved.mkdir()
    state = source(first).state()
    first.rename(moved / "a.jsonl")
    source(moved / "a.jsonl").load_state(state)
    with pytest.raises(DataError, match=r"prompts\.content: was "):
        source(count_up(9)).load_state(source(texts([f"q{k}" for k in range(9)])).state())


def test_every_count_of_a_position_comes_back():
    found = source(count_up(4))
    state = found.state() | {"draws": 17, "seen": 19, "too_long": 5, "bad": 3, "positions": [[2, 3]]}
    found.load_state(state)
    assert found.state() == state and (found.too_long, found.bad, found.seen) == (5, 3, 19)
    assert found.epoch == 2.75  # (2 x 4 + 3) / 4


# --- mixtures -----------------------------------------------------------------------------------------------------


def test_a_mixture_draws_in_proportion_to_the_weights(tmp_path):
    large, small = numbered(tmp_path, 900, "large.jsonl"), numbered(tmp_path, 10, "small.jsonl", start=900)
    found = source({"path": str(large), "weight": 1}, {"path": str(small), "weight": 3})
    rows = draws(found, 2000)
    share = sum(row >= 900 for row in rows) / 2000
    assert abs(share - 0.75) < 5 * (0.75 * 0.25 / 2000) ** 0.5
    of_small = [row for row in rows if row >= 900]
    assert all(sorted(of_small[k : k + 10]) == list(range(900, 910)) for k in range(0, len(of_small) - 9, 10))
    of_large = [row for row in rows if row < 900]
    assert len(set(of_large)) == len(of_large) < 900  # none comes back before its epoch is over
    assert found.epoch == pytest.approx(2000 / 910)
    assert "weight" in str(found.fingerprint)
    assert source({"path": str(large), "weight": 5}).next().row < 900


def test_items_have_their_own_keys(tmp_path):
    first = write(tmp_path, '{"prompt": "a", "answer": 1}', name="a.jsonl")
    second = write(tmp_path, '{"question": "b", "gold": {"value": 2}}', name="b.jsonl")
    found = read(first, {"path": str(second), "prompt_key": "question", "answer_key": "gold.value"})
    assert [(row.text, row.answer) for row in found] == [("a", "1"), ("b", "2")]


# --- bad rows -----------------------------------------------------------------------------------------------------


def with_bad_rows(folder, size, bad, name="rows.jsonl"):
    return write(
        folder,
        *('{"prompt": ""}' if k in bad else f'{{"prompt": "p{k}", "answer": {k}}}' for k in range(size)),
        name=name,
    )


def test_bad_rows_fail_with_all_of_them_named(tmp_path):  # failures.md 68
    first, second = with_bad_rows(tmp_path, 9, {2, 5}, "a.jsonl"), with_bad_rows(tmp_path, 9, {8}, "b.jsonl")
    with pytest.raises(DataError) as caught:
        source(first, second)
    assert str(caught.value) == f"{first}:3: 'prompt' is empty (2 more with this: {first}:6, {second}:9)"


def test_bad_rows_are_skipped_up_to_a_share(tmp_path):
    path = with_bad_rows(tmp_path, 20, {3, 4})
    found = source(path, on_bad_row="skip", max_bad_rows=0.1)
    assert (found.report.bad, found.report.usable, len(found.report.faults)) == (2, 18, 1)
    assert found.report.faults[0] == f"{path}:4: 'prompt' is empty (1 more with this: {path}:5)"
    rows = draws(found, 90)
    assert set(Counter(rows).values()) == {5} and not {3, 4} & set(rows) and found.bad in (9, 10)
    with pytest.raises(
        DataError, match=r"(?s)2 of 20 rows are bad \(10.0%\), more than data.max_bad_rows=0.09.*rows.jsonl:4"
    ):
        source(path, on_bad_row="skip", max_bad_rows=0.09)
    with pytest.raises(DataError, match="is empty"):
        read(path)  # an evaluation skips none
    with pytest.raises(DataError, match=r"3 rows were read, all of them bad"):
        source(with_bad_rows(tmp_path, 3, {0, 1, 2}), on_bad_row="skip", max_bad_rows=1)


def test_rows_beyond_the_first_are_looked_at_when_they_are_drawn(tmp_path, short_head):
    path = with_bad_rows(tmp_path, 60, {33, 41})
    found = source(path, shuffle=False)
    assert (found.report.checked, found.report.rows, found.report.whole) == (20, 60, False)
    assert draws(found, 33) == list(range(33))
    with pytest.raises(DataError, match=r"rows.jsonl:34: 'prompt' is empty.*\n.*on_bad_row=skip"):
        found.next()
    heard = []
    skipping = source(path, shuffle=False, on_bad_row="skip", max_bad_rows=0.1, warn=heard.append)
    assert draws(skipping, 116) == [k for k in range(60) if k not in (33, 41)] * 2
    assert [f"{path}:34" in heard[0], f"{path}:42" in heard[1], len(heard)] == [True, True, 2]
    assert skipping.state()["bad"] == 4
    worse = source(
        with_bad_rows(tmp_path, 60, set(range(25, 60, 2))), shuffle=False, on_bad_row="skip", max_bad_rows=0.1
    )
    with pytest.raises(DataError, match=r"more than data.max_bad_rows=0.1 allows"):
        draws(worse, 60)


def test_the_last_bad_row_that_is_named_says_that_others_are_not(tmp_path, short_head):
    count = SHOWN_FAULTS + 3
    heard = []
    found = source(
        with_bad_rows(tmp_path, 25 + count + 5, set(range(25, 25 + count))),
        shuffle=False,
        on_bad_row="skip",
        max_bad_rows=1,
        warn=heard.append,
    )
    draws(found, 30)
    assert found.bad == count and len(heard) == SHOWN_FAULTS
    assert [text.endswith("; further ones are counted and not named") for text in heard] == [
        *[False] * (SHOWN_FAULTS - 1),
        True,
    ]


def test_a_few_first_rows_of_every_file_are_checked(tmp_path, short_head):
    files = [with_bad_rows(tmp_path, size, {1} if k == 2 else (), f"{k}.jsonl") for k, size in enumerate((3, 100, 50))]
    with pytest.raises(DataError, match=r"2.jsonl:2: "):
        source(*files)
    assert source(*files[:2]).report.checked == 20


def test_the_rows_that_are_checked_are_spread_as_evenly_as_the_sizes_allow(short_head):
    """Of 20: all 3 of the smallest, 17 // 2 = 8 of the next one, and the other 9 of the largest, from its beginning."""
    parts = [SimpleNamespace(table=range(size)) for size in (3, 100, 50)]
    found = list(dapo.data.parts.spread([SimpleNamespace(parts=parts)]))
    assert found == [(0, row) for row in (*range(3), *range(3, 12), *range(103, 111))]


def test_a_template_that_refuses_a_row_makes_it_a_bad_one():
    tokenizer = char_tokenizer(
        chat_template="{% if messages|length > 1 %}{{ raise_exception('one\nonly') }}{% endif %}hi"
    )
    template = PromptTemplate(DataConfig(template="chat"), tokenizer)
    rows = texts(["a", [{"role": "user", "content": "b"}] * 2])
    with pytest.raises(DataError, match=r"^prompts\[1\]: .*one only$"):
        load_prompts(DataConfig(), rows, template)
    assert load_prompts(DataConfig(on_bad_row="skip", max_bad_rows=0.5), rows, template).report.bad == 1


def test_a_prompt_without_tokens_is_reported():
    tokenizer = char_tokenizer()
    tokenizer.backend_tokenizer.normalizer = __import__("tokenizers").normalizers.Replace("x", "")
    template = PromptTemplate(DataConfig(template="plain"), tokenizer)
    with pytest.raises(DataError, match=r"prompts\[0\]: the tokenizer makes no tokens"):
        load_prompts(DataConfig(template="plain"), [{"prompt": "xx", "answer": "1"}], template)


# --- answers ------------------------------------------------------------------------------------------------------


def test_shuffled_answers_are_a_permutation_without_fixed_points():
    plain, shuffled = source(count_up(100)), source(count_up(100), shuffle_answers=True)
    answers = [p.answer for p in shuffled.prompts]
    assert sorted(answers) == sorted(p.answer for p in plain.prompts)
    assert all(answer != str(k) for k, answer in enumerate(answers))
    assert answers == [p.answer for p in source(count_up(100), shuffle_answers=True).prompts]
    assert answers != [p.answer for p in source(count_up(100), shuffle_answers=True, seed=2).prompts]
    bare = list(shuffled.untokenized())
    assert [p.row for p in bare] == list(range(100)) and [p.answer for p in bare] == answers
    assert draws(plain, 20) == draws(shuffled, 20)


def test_answers_may_be_missing_where_no_reward_needs_them():
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b"}]
    found = load_prompts(DataConfig(template="plain", shuffle=False), rows, PLAIN, answer_required=False)
    assert [(p.text, p.answer) for p in found.prompts] == [("a", "1"), ("b", None)]
    with pytest.raises(DataError, match=r"prompts\[1\]: no key 'answer'"):
        load_prompts(DataConfig(template="plain"), rows, PLAIN)


def test_every_row_is_drawn_equally_often_over_epochs():
    assert set(Counter(draws(source(count_up(7)), 70)).values()) == {10}
    assert draws(source(count_up(1)), 3) == [0, 0, 0]


def test_placeholders_are_counted_and_the_first_row_is_named(tmp_path):
    rows = texts(["a", "b", "c", "d"], ["1", "proof", "2", "N/A"])
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(train=[str(file)], template="plain")
    template = PromptTemplate(data, char_tokenizer())
    first = f"{file}:2: answer is 'proof'"
    found = load_prompts(data, data.train, template).report.doubts
    assert {what: (len(places), places[0]) for what, places in found.items()} == {NO_ANSWER: (2, first)}
    said = []
    read_prompts(data, data.train, template, warn=said.append)
    assert said == [f"2 of 4 rows have a placeholder for an answer, such as {first}"]
    assert load_prompts(data, data.train, template, answer_required=False).report.doubts == {}
