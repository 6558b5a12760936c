"""The prompt source: length filter, identity, order, position, control experiment."""

import json
from collections import Counter

import pytest
from tokenizers_for_tests import CHAT, char_tokenizer

from dapo.config import DataConfig
from dapo.data.jsonl import Row
from dapo.data.source import DataReport, PromptSource, load_prompts
from dapo.data.template import PromptTemplate
from dapo.errors import DataError

PLAIN = PromptTemplate(DataConfig(template="plain"), char_tokenizer())


def source(rows=10, **options):
    if isinstance(rows, int):
        rows = [Row(f"p{k}", str(k)) for k in range(rows)]
    options = {"seed": 1, "shuffle": True, "max_prompt_length": 100, **options}
    return PromptSource(rows, PLAIN, **options)


def draws(source, count):
    return [source.draw().row for _ in range(count)]


def test_the_limit_counts_tokens_of_the_template_used():  # failures.md 30, 67
    chat = PromptTemplate(DataConfig(template="chat"), char_tokenizer(chat_template=CHAT))
    frame = len(chat.encode("x")) - 1
    rows = [Row("a" * 5, "1"), Row("a" * 6, "2"), Row(({"role": "user", "content": "b" * 6},), "3"), Row("c" * 7, "4")]
    found = PromptSource(rows, chat, seed=0, shuffle=False, max_prompt_length=frame + 6)
    assert [(p.row, p.text, len(p.token_ids)) for p in found.prompts] == [
        (0, "a" * 5, frame + 5),
        (1, "a" * 6, frame + 6),
        (2, "b" * 6, frame + 6),
    ]
    assert found.report == DataReport(rows=4, too_long=1, duplicates=0, conflicts=0, longest=frame + 6)
    assert found.report.usable == len(found) == 3


def test_nothing_left_names_the_numbers():  # failures.md 67
    with pytest.raises(DataError, match=r"3 rows were read.*max_prompt_length=4.*shortest has 5"):
        source([Row("a" * k, "1") for k in (5, 6, 7)], max_prompt_length=4)


def test_equal_prompts_are_rows_of_their_own_and_counted():  # failures.md 74
    found = source([Row("2+2", "4"), Row("2+2", "four"), Row("2+2", "4"), Row("3+3", "6")], shuffle=False)
    assert draws(found, 4) == [0, 1, 2, 3]
    assert (found.report.duplicates, found.report.conflicts) == (2, 1)
    assert [p.answer for p in found.prompts] == ["4", "four", "4", "6"]


def test_order_of_the_files_when_shuffle_is_off():  # failures.md 77
    assert draws(source(4, shuffle=False), 10) == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_each_epoch_holds_every_row_once_in_another_order():  # failures.md 86
    found = source(50)
    epochs = [draws(found, 50) for _ in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert draws(source(50), 50) == epochs[0]
    assert draws(source(50, seed=2), 50) != epochs[0]


@pytest.mark.parametrize("stop", [0, 1, 999, 1000, 1024, 2000, 2500])
def test_rows_after_resume_equal_the_uninterrupted_run(stop):  # failures.md 85
    whole = draws(source(1000), 3000)
    first = source(1000)
    assert draws(first, stop) == whole[:stop]
    state = json.loads(json.dumps(first.state()))
    resumed = source(1000)
    draws(resumed, 7)  # an iterator that was used before the state came
    resumed.load_state(state)
    assert draws(resumed, 500) == whole[stop : stop + 500]


def test_a_position_in_other_data_is_refused():  # failures.md 89
    with pytest.raises(DataError, match="held 10 usable prompts, now it holds 9"):
        source(9).load_state(source(10).state())


def test_shuffled_answers_are_a_permutation_without_fixed_points():
    plain, shuffled = source(100), source(100, shuffle_answers=True)
    answers = [p.answer for p in shuffled.prompts]
    assert sorted(answers) == sorted(p.answer for p in plain.prompts)
    assert all(answer != str(k) for k, answer in enumerate(answers))
    assert answers == [p.answer for p in source(100, shuffle_answers=True).prompts]
    assert answers != [p.answer for p in source(100, shuffle_answers=True, seed=2).prompts]
    assert draws(plain, 20) == draws(shuffled, 20)


def test_load_prompts_for_training_and_evaluation(tmp_path):  # failures.md 76
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{k}", "answer": k, "level": k % 3}) + "\n" for k in range(30)))
    data = DataConfig(template="plain", shuffle_answers=True, max_prompt_length=3)
    train = load_prompts(data, [str(path)], PLAIN, seed=3)
    heldout = load_prompts(data, [str(path)], PLAIN, seed=3, evaluation=True, limit=20)
    assert [(p.row, p.text, p.answer) for p in heldout.prompts] == [(k, f"p{k}", str(k)) for k in range(20)]
    assert draws(heldout, 20) == list(range(20)) != draws(train, 20)
    assert train.prompts[4].answer != "4" and train.prompts[4].meta == {"level": 1}


def test_load_prompts_takes_rows_from_python():
    data = DataConfig(template="plain", shuffle=False)
    found = load_prompts(data, [{"prompt": "a", "answer": 1}, {"prompt": "b"}], PLAIN, answer_required=False)
    assert [(p.text, p.answer) for p in found.prompts] == [("a", "1"), ("b", None)]
    with pytest.raises(DataError, match=r"prompts\[1\]: no key 'answer'"):
        load_prompts(data, [{"prompt": "a", "answer": 1}, {"prompt": "b"}], PLAIN)
    with pytest.raises(DataError, match=r"no rows|no data files"):
        load_prompts(data, [], PLAIN)


def test_every_row_is_drawn_equally_often_over_epochs():
    assert set(Counter(draws(source(7), 70)).values()) == {10}


def test_a_prompt_without_tokens_is_reported():
    tokenizer = char_tokenizer()
    tokenizer.backend_tokenizer.normalizer = __import__("tokenizers").normalizers.Replace("x", "")
    template = PromptTemplate(DataConfig(template="plain"), tokenizer)
    with pytest.raises(DataError, match="rows:3: the tokenizer makes no tokens"):
        PromptSource([Row("xx", "1", place="rows:3")], template, seed=0, shuffle=False, max_prompt_length=5)
