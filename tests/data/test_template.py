"""From rows to token ids: templates, special tokens, decoding."""

from datetime import date, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import CHAT, CHAT_WITH_BOS, byte_tokenizer, char_tokenizer, sentencepiece_tokenizer

from dapo.config import DataConfig
from dapo.data.parts import Part, Rows, encode, encode_all
from dapo.data.rows import BadRow, Keys, PythonRows
from dapo.data.template import PromptTemplate
from dapo.errors import ConfigError, DataError


def rendered(tokenizer, prompt, **config):
    template = PromptTemplate(DataConfig(**config), tokenizer)
    ids = template.encode(prompt)
    assert all(type(token) is int for token in ids)
    return "".join(tokenizer.convert_ids_to_tokens(ids))


def test_plain_is_the_text_as_it_stands():
    assert rendered(char_tokenizer(), "2+2=", template="plain") == "2+2="
    assert rendered(char_tokenizer(), "2+2=", template="plain", instruction="\nGo.") == "2+2=\nGo."
    messages = ({"role": "user", "content": "a"}, {"role": "user", "content": "b"})
    assert rendered(char_tokenizer(), messages, template="plain", system="ignored") == "a\n\nb"


def test_chat_template_with_system_and_instruction():
    tokenizer = char_tokenizer(chat_template=CHAT)
    assert rendered(tokenizer, "hi", template="chat") == "[user]hi<e>[assistant]"
    full = rendered(tokenizer, "hi", template="chat", system="S", instruction=" Box it.")
    assert full == "[system]S<e>[user]hi Box it.<e>[assistant]"
    own = ({"role": "system", "content": "own"}, {"role": "user", "content": "hi"})
    assert rendered(tokenizer, own, template="chat", system="S") == "[system]own<e>[user]hi<e>[assistant]"


def test_dapo_asks_for_an_answer_line_with_and_without_a_chat_template():
    chat = rendered(char_tokenizer(chat_template=CHAT), "1+1?", template="dapo")
    plain = rendered(char_tokenizer(), "1+1?", template="dapo")
    assert chat == f"[user]{plain}<e>[assistant]"
    assert plain == (  # as in the released training data
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\n1+1?\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    )


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("chat_template", [CHAT, CHAT_WITH_BOS])
def test_one_bos_in_a_chat(adds_bos, chat_template):  # failures.md 38
    tokenizer = char_tokenizer(adds_bos=adds_bos, chat_template=chat_template)
    ids = PromptTemplate(DataConfig(template="chat"), tokenizer).encode("hi")
    assert ids.count(tokenizer.bos_token_id) == (chat_template is CHAT_WITH_BOS)
    assert PromptTemplate(DataConfig(template="chat"), tokenizer).encode("<s>hi").count(0) <= 2  # the user's own text


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("adds_eos", [False, True])
def test_plain_prompts_have_one_bos_and_no_eos(adds_bos, adds_eos):  # failures.md 38
    tokenizer = char_tokenizer(adds_bos=adds_bos, adds_eos=adds_eos)
    assert rendered(tokenizer, "ab", template="plain") == "<s>" * adds_bos + "ab"
    assert rendered(tokenizer, "<s>ab", template="plain") == "<s>ab"


def test_a_tokenizer_without_chat_template_is_refused_with_two_ways_out():  # failures.md 66
    with pytest.raises(ConfigError, match=r"data\.template=plain, or a tokenizer .*data\.chat_template") as caught:
        PromptTemplate(DataConfig(template="chat"), char_tokenizer())
    assert "no chat template" in str(caught.value)


def test_a_template_file_takes_the_place_of_the_tokenizers_own(tmp_path):  # failures.md 66
    file = tmp_path / "chat.jinja"
    file.write_text(CHAT)
    tokenizer = char_tokenizer()
    assert rendered(tokenizer, "hi", template="chat", chat_template=str(file)) == "[user]hi<e>[assistant]"
    assert tokenizer.chat_template == CHAT  # so that it is saved with the model
    other = char_tokenizer(chat_template="other")
    assert rendered(other, "1+1?", template="dapo", chat_template=str(file)).startswith("[user]Solve")
    file.write_text("{% for %}")
    with pytest.raises(ConfigError, match=rf"data.chat_template: {file}: .*refuses"):
        PromptTemplate(DataConfig(chat_template=str(file)), char_tokenizer())
    for broken in (tmp_path, tmp_path / "none.jinja"):
        with pytest.raises(ConfigError, match=r"data\.chat_template: cannot read"):
            PromptTemplate(DataConfig(chat_template=str(broken)), char_tokenizer())
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not a text file"):
        PromptTemplate(DataConfig(chat_template=str(file)), char_tokenizer())


def test_a_template_that_refuses_the_messages_is_reported():
    tokenizer = char_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match="roles must alternate"):
        PromptTemplate(DataConfig(template="chat"), tokenizer).encode("hi")


def test_decode_leaves_control_tokens_out_and_takes_empty_responses():  # failures.md 73
    tokenizer = char_tokenizer()
    template = PromptTemplate(DataConfig(template="plain"), tokenizer)
    ids = [*tokenizer.convert_tokens_to_ids(list("a , b.")), tokenizer.eos_token_id]
    assert template.decode(ids) == "a , b."
    assert template.decode([tokenizer.eos_token_id]) == ""
    assert template.decode([]) == ""


@pytest.mark.parametrize("make", [char_tokenizer, byte_tokenizer, sentencepiece_tokenizer])
def test_ids_without_a_token_do_not_vanish_from_a_text(make):  # models have more rows than their tokenizers have tokens
    tokenizer = make()
    template = PromptTemplate(DataConfig(template="plain"), tokenizer)
    four = tokenizer.get_vocab()["8" if make is sentencepiece_tokenizer else "4"]
    said = tokenizer.decode([four])
    assert template.decode([four, 400, four]) == f"{said}\ufffd{said}"
    assert template.decode([400, tokenizer.eos_token_id, four, 401, 402]) == f"\ufffd{said}\ufffd\ufffd"
    assert template.decode([four, tokenizer.eos_token_id]) == said


def test_a_token_that_is_there_twice_is_text_both_times():
    tokenizer = char_tokenizer()
    vocabulary = tokenizer.get_vocab()
    template = PromptTemplate(DataConfig(template="plain"), tokenizer)
    tokenizer.get_vocab = lambda: {token: i for token, i in vocabulary.items() if token != "4"}
    assert template.decode([vocabulary["4"], vocabulary["2"]]) == "42"


def test_the_instruction_goes_with_the_last_question_of_several_turns():  # not with the first one
    turns = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"})
    tokenizer = char_tokenizer(chat_template=CHAT)
    said = rendered(tokenizer, turns, template="chat", instruction=" Box it.")
    assert said == "[user]a<e>[assistant]b<e>[user]c Box it.<e>[assistant]"
    said = rendered(tokenizer, turns, template="dapo")
    assert (
        said.startswith("[user]a<e>[assistant]b<e>[user]Solve the following math problem") and said.count("Solve") == 1
    )
    ends_with_answer = turns[:2]  # the last question all the same
    assert rendered(tokenizer, ends_with_answer, template="plain", instruction="!") == "a!\n\nb"


QWEN3 = CHAT.removesuffix("{% endif %}") + "{% if enable_thinking is false %}<t></t>{% endif %}{% endif %}"


def test_variables_of_the_chat_template_can_be_given():  # OpenRLHF#1073
    tokenizer = char_tokenizer(chat_template=QWEN3)
    assert rendered(tokenizer, "hi") == "[user]hi<e>[assistant]"
    assert rendered(tokenizer, "hi", chat_template_kwargs={"enable_thinking": False}) == "[user]hi<e>[assistant]<t></t>"
    assert rendered(tokenizer, "hi", chat_template_kwargs={"enable_thinking": True}) == "[user]hi<e>[assistant]"


def test_what_would_come_to_nothing_is_refused_with_its_place():
    def template(tokenizer, **config):
        return PromptTemplate(DataConfig(**config), tokenizer)

    tokenizer = char_tokenizer(chat_template="{% generation %}{% endgeneration %}" + QWEN3)
    with pytest.raises(
        ConfigError, match=r"data\.chat_template_kwargs\.enable_thinkin: .*did you mean enable_thinking\?"
    ):
        template(tokenizer, chat_template_kwargs={"enable_thinkin": False})
    with pytest.raises(ConfigError, match=r"chat_template_kwargs\.zzz: .*its variables are enable_thinking"):
        template(tokenizer, chat_template_kwargs={"zzz": 1})
    with pytest.raises(ConfigError, match=r"data\.chat_template_kwargs: enable_thinking: .*data\.template is plain"):
        template(tokenizer, template="plain", chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(ConfigError, match=r"data\.chat_template_kwargs: x: .*the tokenizer has no chat template"):
        template(char_tokenizer(), template="dapo", chat_template_kwargs={"x": 1})
    for name in ("messages", "add_generation_prompt", "tokenize", "strftime_now", "chat_template"):
        with pytest.raises(ValueError, match=rf"{name}: is set by the program"):
            DataConfig.model_validate({"chat_template_kwargs": {name: 1}})


# as Llama 3's does
DATED = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "Today is {{ date_string }}. " + CHAT
)


def test_a_template_is_told_one_date():
    tokenizer = char_tokenizer(chat_template=DATED)
    said = rendered(tokenizer, "hi", today="2024-02-05")
    assert said == "Today is 05 Feb 2024. [user]hi<e>[assistant]"
    assert tokenizer.chat_template == DATED  # what is saved with the model is its own
    own = rendered(tokenizer, "hi", today="2024-02-05", chat_template_kwargs={"date_string": "then"})
    assert own == "Today is then. [user]hi<e>[assistant]"
    assert PromptTemplate(DataConfig(today="2024-02-05"), tokenizer).today == date(2024, 2, 5)
    assert PromptTemplate(DataConfig(), tokenizer).today in (date.today(), date.today() - timedelta(1))
    assert PromptTemplate(DataConfig(), char_tokenizer(chat_template=CHAT)).today is None


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("%Y-%m-%d", "2024-02-05"),
        ("%-d. %B %y", "5. February 24"),
        ("%A, %j %H:%M", "Monday, 036 00:00"),
        ("%F %T", "2024-02-05 00:00:00"),
    ],
)
@pytest.mark.parametrize("before", ["", "\n", "  \n", "{# note #}\n"])
def test_a_date_in_any_form_and_nothing_else_of_the_template_changes(wanted, found, before):
    tokenizer = char_tokenizer(
        chat_template=before + "  {% if true %}\n{{ strftime_now('" + wanted + "') }}{% endif %}" + CHAT
    )
    plain = char_tokenizer(chat_template=before + "  {% if true %}\n{{ '" + found + "' }}{% endif %}" + CHAT)
    assert rendered(tokenizer, "hi", today="2024-02-05") == rendered(plain, "hi")


REFUSING = "{% if 'refuse' in messages[-1]['content'] %}{{ raise_exception('no') }}{% endif %}" + CHAT_WITH_BOS
TOKENIZERS = {
    "bos-and-eos": char_tokenizer(adds_bos=True, adds_eos=True),
    "chat": char_tokenizer(adds_bos=True, chat_template=CHAT_WITH_BOS),
    "refusing": char_tokenizer(chat_template=REFUSING),
    "bytes": byte_tokenizer(special=("<s>", "<think>"), chat_template=CHAT),
}
TEXTS = st.text(max_size=30) | st.sampled_from(
    ["", "<s>", "a<s><s>", "<e>", "please refuse", "<think>x", "数学 🙂 e\u0301"]
)
PROMPTS = TEXTS | st.tuples(TEXTS, TEXTS).map(
    lambda said: tuple({"role": role, "content": text} for role, text in zip(("system", "user"), said, strict=True))
)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("kind", ["plain", "dapo", "chat"])
@pytest.mark.parametrize("rows", [None, 60])  # of the embedding: most texts hold a token beyond 60
@settings(max_examples=25, deadline=None)
@given(prompts=st.lists(PROMPTS, min_size=1, max_size=6))
def test_many_at_once_are_as_one_by_one(name, kind, rows, prompts):
    tokenizer = TOKENIZERS[name]
    if kind == "chat" and not tokenizer.chat_template:
        return
    template = PromptTemplate(DataConfig(template=kind, system="S", instruction=" Go."), tokenizer, rows)
    said = [one if isinstance(one, str) else list(one) for one in prompts]
    table = Rows(
        [Part(PythonRows([{"prompt": one} for one in said], "prompts"), Keys(answer_required=False), "prompts")]
    )

    def alone(number):
        try:
            row = table[number]
            return row, encode(row, template)
        except BadRow as fault:
            return fault

    found = list(encode_all(((table, number) for number in range(len(prompts))), template))
    assert [*map(repr, found)] == [repr(alone(number)) for number in range(len(prompts))]
    assert all(type(token) is int for one in found if isinstance(one, tuple) for token in one[1])
