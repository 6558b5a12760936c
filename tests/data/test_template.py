"""From rows to token ids: templates, special tokens, decoding."""

import pytest
from tokenizers_for_tests import CHAT, CHAT_WITH_BOS, char_tokenizer

from dapo.config import DataConfig
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
    before, problem, after = plain.partition("1+1?")
    assert "step by step" in before and "Answer: $Answer" in before and problem and '"Answer:"' in after


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


def test_decode_leaves_special_tokens_out_and_takes_empty_responses():  # failures.md 73
    tokenizer = char_tokenizer()
    template = PromptTemplate(DataConfig(template="plain"), tokenizer)
    ids = [*tokenizer.convert_tokens_to_ids(list("a , b.")), tokenizer.eos_token_id]
    assert template.decode(ids) == "a , b."
    assert template.decode([tokenizer.eos_token_id]) == ""
    assert template.decode([]) == ""
