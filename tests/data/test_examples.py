"""Rows to learn from: what a row may be, the ids that are learned, and an order that goes on from anywhere."""

from __future__ import annotations

import json

import pytest

from dapo.config.stages import DPOData, RewardModelData, SFTData
from dapo.data.examples import Example, PolicyText, conversation, labelled, open_examples, ranked, read_examples
from dapo.data.rows import BadRow, PythonRows
from dapo.data.template import PromptTemplate
from dapo.errors import DataError
from data.tokenizers_for_tests import CHAT, CHAT_WITH_BOS, char_tokenizer

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
DPO, RM, SFT = DPOData(), RewardModelData(), SFTData()


def policy_text(template="chat", chat_template=CHAT, **data):
    tokenizer = char_tokenizer(chat_template=chat_template, adds_bos=True, adds_eos=True)
    config = SFTData(template=template, **data)
    return tokenizer, PolicyText(PromptTemplate(config, tokenizer), tokenizer, template != "plain")


def text_of(tokenizer, ids):
    return tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)


@pytest.mark.parametrize(
    ("row", "prompt", "responses", "values"),
    [
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, "p", ("a", "b"), (0, 1)),
        ({"prompt": [USER], "chosen": "a", "rejected": "b"}, (USER,), ("a", "b"), (0, 1)),
        (
            {"chosen": [USER, ASSISTANT], "rejected": [USER, {"role": "assistant", "content": "no"}]},
            (USER,),
            ("yo", "no"),
            (0, 1),
        ),
        ({"prompt": "p", "responses": ["a", "b", "c"]}, "p", ("a", "b", "c"), (0, 1, 2)),
        ({"prompt": "p", "responses": ["a", "b"], "scores": None, "chosen": None}, "p", ("a", "b"), (0, 1)),
        ({"prompt": "p", "responses": None, "chosen": "a", "rejected": "b"}, "p", ("a", "b"), (0, 1)),
        ({"prompt": "p", "responses": ["a", "b", "c"], "scores": [1, 5, 1.0]}, "p", ("a", "b", "c"), (1, 0, 1)),
    ],
)
def test_pairs_and_rankings(row, prompt, responses, values):
    found = ranked(row, DPO)
    assert (found.prompt, found.responses, found.values) == (prompt, responses, values)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "p", "chosen": "a"}, "no key 'rejected' (data.rejected_key)"),
        ({"chosen": "a", "rejected": "b"}, "no key 'prompt' (data.prompt_key)"),
        ({"chosen": [USER, ASSISTANT], "rejected": [ASSISTANT, ASSISTANT]}, "different conversations"),
        ({"chosen": [USER], "rejected": [USER]}, "must end with a message of the assistant"),
        ({"prompt": "p", "responses": ["a", "b"], "scores": [1, 1]}, "no response in 'responses' is better"),
        ({"prompt": "p", "responses": ["a", "b"], "scores": [1, True]}, "must be a list of finite numbers"),
        ({"prompt": "p", "responses": ["a", "b"], "scores": [1]}, "has 1 numbers for 2 responses"),
        ({"prompt": "p", "responses": "ab"}, "must be a list of texts"),
        ("text", "expected an object"),
    ],
)
def test_what_is_no_pair_is_said(row, reason):
    with pytest.raises(BadRow, match="^.*" + reason.replace("(", r"\(").replace(")", r"\)")):
        ranked(row, DPO)


def test_a_reward_model_reads_margins_labels_and_texts_without_a_prompt():
    for margin, expected in ((2, 2.0), (None, 0.0)):
        row = {"prompt": None, "chosen": "a", "rejected": "b", "margin": margin}
        assert ranked(row, RM, needs_prompt=False)[::3] == ("", expected)
    found = labelled({"response": "a", "label": True}, RM)
    assert (found.prompt, found.responses, found.values) == ("", ("a",), (1.0,))
    with pytest.raises(BadRow, match="'label' must be true or false"):
        labelled({"response": "a", "label": 0.5}, RM)
    with pytest.raises(BadRow, match="'margin' must be a finite number"):
        ranked({"chosen": "a", "rejected": "b", "margin": "2"}, RM, needs_prompt=False)


def test_a_demonstration_is_a_conversation():
    told = conversation({"prompt": "hi", "response": "yo"}, SFT)
    assert told == conversation({"messages": [USER, ASSISTANT]}, SFT) == (USER, ASSISTANT)
    assert told == conversation({"messages": None, "prompt": "hi", "response": "yo"}, SFT)
    with pytest.raises(BadRow, match="nothing to imitate"):
        conversation({"messages": [ASSISTANT, USER]}, SFT)


# --- ids ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["chat", "plain"])
@pytest.mark.parametrize("ending", ["", "<e>"])
def test_no_begin_or_end_token_is_doubled(template, ending):
    """Neither by the template and the tokenizer, nor by a text that has its end already."""
    tokenizer, text = policy_text(template, CHAT_WITH_BOS)
    tokenizer.add_special_tokens({"additional_special_tokens": []})
    response = text.response("yo" + ending)
    assert response[-1] == tokenizer.eos_token_id and response.count(tokenizer.eos_token_id) == 1
    assert tokenizer.bos_token_id not in response
    (example,) = text.pieces((USER, ASSISTANT))
    assert example.prompt.count(tokenizer.bos_token_id) == 1 and example.prompt[-1] != tokenizer.eos_token_id


def test_of_a_conversation_only_the_assistant_is_learned():
    tokenizer, text = policy_text()
    (example,) = text.pieces((USER, ASSISTANT, USER, {"role": "assistant", "content": "ok"}))
    ids = example.responses[0]
    learned = [token for token, is_learned in zip(ids, example.learned, strict=True) if is_learned]
    assert text_of(tokenizer, learned) == "yo<e>ok<e>"
    assert text_of(tokenizer, (*example.prompt, *ids)).endswith(
        "[user]hi<e>[assistant]yo<e>[user]hi<e>[assistant]ok<e>"
    )


def test_a_template_that_rewrites_the_past_begins_another_example():
    """Such as one that leaves out earlier thoughts: a shorter conversation is no prefix of the longer one."""
    drops = CHAT.replace("{{ m['content'] }}", "{{ m['content'] if loop.last or m.role == 'user' else '' }}")
    tokenizer, text = policy_text(chat_template=drops)
    first, second = text.pieces((USER, ASSISTANT, USER, ASSISTANT))
    assert text_of(tokenizer, first.responses[0]) == text_of(tokenizer, second.responses[0]) == "yo<e>"
    assert text_of(tokenizer, second.prompt).endswith("[user]hi<e>[assistant]<e>[user]hi<e>[assistant]")


def test_the_response_ends_as_the_template_ends_it():
    marks = CHAT.replace("<e>", "<|im_end|>")
    tokenizer = char_tokenizer(chat_template=marks)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    text = PolicyText(PromptTemplate(SFTData(), tokenizer), tokenizer, True)
    assert text.response("yo")[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>") != tokenizer.eos_token_id


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "p", "chosen": "a", "rejected": "a"},
        {"prompt": "p", "chosen": "a", "rejected": "a<e>"},  # other text, the same tokens
        {"prompt": "p", "responses": ["a", "b", "a"]},
    ],
)
def test_responses_of_different_rank_are_different_tokens(row):
    """No loss tells them apart; of equal rank they are a tie."""
    _, text = policy_text("plain")

    def opened(row):
        return open_examples(
            PythonRows([row], "rows"), lambda one: [text.responses(ranked(one, DPO))], SFTData(), 0, print
        )

    with pytest.raises(DataError, match=r"rows\[0\]: two responses, one of them better, are the same"):
        opened(row)
    opened({"prompt": "p", "responses": ["a", "a", "b"], "scores": [1, 1, 0]})


# --- order --------------------------------------------------------------------------------------------------------


def encode(row):
    if row.get("bad"):
        raise BadRow("is bad")
    return [Example((1,), ((2,) * row["n"],))]


def source(rows, tell=lambda text: None, limit=None, **data):
    return open_examples(PythonRows(rows, "rows"), encode, SFTData(max_length=20, rows=limit, **data), 0, tell)


def length(drawn):
    (one,) = drawn.meta["examples"]
    return len(one.responses[0])


def test_each_epoch_holds_every_row_once_in_another_order():
    one = source([{"n": n} for n in range(1, 9)])
    epochs = [[length(one.next()) for _ in range(8)] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(1, 9)) and epochs[0] != epochs[1]
    assert one.epoch == 2.0


def test_it_goes_on_from_any_position():
    rows = [{"n": n, "bad": n == 3} for n in range(1, 9)]
    one, other = (source(rows, on_bad_row="skip", max_bad_rows=0.5) for _ in range(2))
    for _ in range(11):
        one.next()
    other.load_state(json.loads(json.dumps(one.state())))
    assert [length(one.next()) for _ in range(9)] == [length(other.next()) for _ in range(9)]
    assert one.state() == other.state()
    with pytest.raises(DataError, match="the data has changed"):
        source([{"n": 1}]).load_state(one.state())


def test_bad_rows_are_named_or_skipped_and_long_ones_left_out_aloud():
    rows = [{"n": 1}, {"n": 2, "bad": True}, {"n": 30}]
    with pytest.raises(DataError, match=r"rows\[1\]: is bad"):
        source(rows)
    told: list[str] = []
    found = source(rows, told.append, on_bad_row="skip", max_bad_rows=0.5)
    assert {length(found.next()) for _ in range(3)} == {1}
    assert any("1 of the first 3 rows are bad" in t for t in told) and any(
        "longer than data.max_length=20" in t for t in told
    )
    with pytest.raises(
        DataError, match=r"no row is left: 1 rows were read, all of them longer than data\.max_length=20"
    ):
        source([{"n": 30}])


def test_rows_limits_what_is_drawn_and_what_is_evaluated():
    rows = [{"n": n} for n in range(1, 9)]
    limited = source(rows, limit=3)
    assert {length(limited.next()) for _ in range(9)} == {1, 2, 3}
    told: list[str] = []
    heldout = PythonRows([*rows, {"n": 30}], "rows")
    assert len(read_examples(heldout, encode, SFTData(max_length=20), None, told.append)[0]) == 8
    assert told == ["evaluation.data: 1 rows are longer than data.max_length=20; they are left out"]
    assert len(read_examples(heldout, encode, SFTData(max_length=20), 4, told.append)[0]) == 4
