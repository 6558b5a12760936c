"""Overlap of training with evaluation prompts, against cases that were thought out by hand."""

import random

from hypothesis import given
from hypothesis import strategies as st

from dapo.data.overlap import BOILERPLATE, find_overlap, words_of

VOCABULARY = [a + b for a in "bcdfgklmnprst" for b in ("alo", "eri", "omu", "una", "iki")]


def sentence(seed, length=30):
    return " ".join(random.Random(seed).choices(VOCABULARY, k=length))


def hits(evaluation, training):
    found = find_overlap([list(enumerate(file)) for file in evaluation], [list(enumerate(file)) for file in training])
    return {(h.train_file, h.train_row, h.eval_file, h.eval_row, "exact" if h.exact else "near") for h in found}


def test_words_are_letters_and_digits():
    assert words_of("Find $x^2+12a$: É, 中文!") == ["find", "x", "2", "12", "a", "é", "中", "文"]


def test_equal_prompts_whatever_case_and_white_space():
    assert hits([["What is 2+2 ?"]], [["other", "what  IS\n2+2 ?"]]) == {(0, 1, 0, 0, "exact")}
    assert hits([["7*3+4-5="]], [["7*3-4+5=", "7 3 4 5"]]) == set()
    assert hits([["1 11"]], [["11 1"]]) == set()


def test_thirteen_words_in_a_row_are_near_and_twelve_are_not():
    whole = sentence(1).split()
    for length, found in ((12, set()), (13, {(0, 0, 0, 0, "near")}), (20, {(0, 0, 0, 0, "near")})):
        text = " ".join([*sentence(2).split(), *whole[5 : 5 + length], *sentence(3).split()])
        assert hits([[" ".join(whole)]], [[text]]) == found
    found = find_overlap([[(4, " ".join(whole))]], [[(9, " ".join(whole[:13]) + " more")]])
    assert [(hit.train_row, hit.eval_row, hit.words) for hit in found] == [(9, 4, " ".join(whole[:13]))]


def test_runs_do_not_reach_from_one_prompt_into_the_next():
    whole = sentence(1).split()
    assert hits([[" ".join(whole)]], [[" ".join(whole[:7]), " ".join(whole[7:14])]]) == set()


def test_a_short_evaluation_prompt_counts_as_a_whole():
    short = sentence(5, 9)
    assert hits([[short]], [[f"first {short} and more", sentence(5, 8)]]) == {(0, 0, 0, 0, "near")}
    assert hits([[sentence(5, 7)]], [[f"first {sentence(5, 7)} and more"]]) == set()


def test_boilerplate_does_not_count():
    phrase = sentence(7, 14)
    few = [f"{sentence(100 + k, 5)} {phrase}" for k in range(BOILERPLATE)]
    many = [*few, f"{sentence(200, 5)} {phrase}", *few]
    assert len(hits([few[:2]], [few[2:]])) == BOILERPLATE - 2
    assert hits([many[:2]], [many[2:]]) == {(0, BOILERPLATE - 1 + k, 0, k, "exact") for k in range(2)}
    assert len(hits([few[:1]], [few[1:] * 5])) == 5 * (BOILERPLATE - 1)  # the same prompt again is no other prompt


def test_a_run_that_is_boilerplate_but_for_a_few_words_does_not_count():
    phrase = sentence(7, 8)
    many = [f"{sentence(100 + k, 5)} {phrase}" for k in range(BOILERPLATE)]
    asked, other = f"{sentence(1)} {phrase} {sentence(2, 5)}", f"{sentence(3)} {phrase} {sentence(2, 5)}"
    assert hits([[asked]], [[other, *many[2:]]]) == {(0, 0, 0, 0, "near")}
    assert hits([[asked]], [[other, *many]]) == set()
    assert hits([[asked]], [[f"{asked} more", *many]]) == {(0, 0, 0, 0, "near")}  # the rest of the prompt is there, too


def test_formulas_are_no_language():
    formula = "a_1 + a_2 + a_3 + a_4 + a_5 + a_6 + a_7 + a_8 = x"
    assert hits([[f"one {formula} thing"]], [[f"another {formula} matter"]]) == set()


def test_four_words_among_thirteen_are_language():
    for fourth, found in (("all", {(0, 0, 0, 0, "near")}), ("0", set())):
        text = f"find 1 2 3 sum 4 5 6 of 7 8 9 {fourth}"
        assert hits([[text]], [[f"{text} 10"]]) == found


def test_of_equal_evaluation_rows_the_first_one_is_named():
    assert hits([["other", "what is 2+2?", "What is 2+2?"]], [["what is 2+2?"]]) == {(0, 0, 0, 1, "exact")}


def test_each_file_is_named_once_for_each_row():
    text = sentence(11, 40)
    found = hits([[text], [sentence(12), text]], [[sentence(13)], [f"{text} more"]])
    assert found == {(1, 0, 0, 0, "near"), (1, 0, 1, 1, "near")}


@given(
    st.lists(st.lists(st.sampled_from(VOCABULARY[:3]), max_size=20).map(" ".join), min_size=1, max_size=6), st.data()
)
def test_it_agrees_with_comparing_every_pair(texts, data):
    other = data.draw(
        st.lists(st.lists(st.sampled_from(VOCABULARY[:3]), max_size=20).map(" ".join), min_size=1, max_size=6)
    )

    def runs(text, size):
        words = text.split()
        return {tuple(words[k : k + size]) for k in range(len(words) - size + 1)}

    expected = set()
    for row, train in enumerate(other):
        same = [k for k, text in enumerate(texts) if text == train]
        sizes = {k: min(13, len(text.split())) for k, text in enumerate(texts)}
        near = [k for k, text in enumerate(texts) if sizes[k] >= 8 and runs(text, sizes[k]) & runs(train, sizes[k])]
        if same or near:
            expected.add((row, bool(same)))
    assert {(row, kind == "exact") for _, row, _, _, kind in hits([texts], [other])} == expected
