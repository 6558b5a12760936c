# ruff: noqa: RUF001
"""Decoded responses are without control tokens and with all others, special or not."""

import pytest
from tokenizers_for_tests import byte_tokenizer, sentencepiece_tokenizer

from dapo.config import DataConfig
from dapo.data.template import PromptTemplate
from dapo.inference.stream import Pieces
from dapo.rollout.native.stopping import StopTexts

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
)
OPEN = CHATML + "<think>\n{% endif %}"
SHUT = CHATML + "{% endif %}"
EMPTY = CHATML + "<think>\n\n</think>\n\n{% endif %}"
# asks for tags in words, as TinyZero's does
IN_WORDS = SHUT.replace("{{ m.content }}", "{{ m.content }} Think in <think> </think>, then <answer>ANSWER</answer>.")
TAGS = ("<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "<|begin_of_thought|>", "<|end_of_thought|>")
SAID = "<think>\na&b</think>\n<answer>8</answer><tool_call> <|begin_of_thought|>x<|end_of_thought|>"


def decoded(tokenizer, text, stop_ids=(), **config):
    template = PromptTemplate(DataConfig(template="plain", **config), tokenizer)
    template.ends_with(stop_ids)
    return template.decode(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("chat_template", [OPEN, SHUT, EMPTY, IN_WORDS])
def test_a_tag_whose_closing_one_is_no_token_stays(chat_template):
    tokenizer = byte_tokenizer(special=("<|im_start|>", "<think>"), eos="<|im_end|>", chat_template=chat_template)
    assert decoded(tokenizer, "<think>a</think>8<|im_end|>") == "<think>a</think>8"


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("chat_template", [OPEN, SHUT, EMPTY, IN_WORDS, None])
def test_tags_stay_and_turn_marks_go_whatever_the_template_writes(chat_template, special):  # TRL#2897, verl#1724
    kinds = {"special": ("<|im_start|>", *TAGS)} if special else {"special": ("<|im_start|>",), "added": TAGS}
    tokenizer = byte_tokenizer(eos="<|im_end|>", pad_token="<|pad|>", chat_template=chat_template, **kinds)
    assert decoded(tokenizer, f"<|im_start|>{SAID}<|im_end|>\n<|im_start|><|pad|>") == f"{SAID}\n"


LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
    "{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


@pytest.mark.parametrize(
    ("kinds", "text", "left"),
    [
        (
            {
                **{"chat_template": LLAMA, "eos": "<|end_of_text|>", "bos_token": "<|begin_of_text|>"},
                "special": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|reserved_special_token_5|>"),
            },
            "8<|reserved_special_token_5|><|eot_id|><|start_header_id|>user<|end_header_id|>",
            "8<|reserved_special_token_5|>user",
        ),
        (
            {
                **{"chat_template": MISTRAL, "eos": "</s>", "bos_token": "<s>"},
                "special": ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[THINK]", "[/THINK]"),
            },
            "<s>[THINK]a[/THINK]8</s>[INST]b[/INST][SYSTEM_PROMPT]c[/SYSTEM_PROMPT]",
            "[THINK]a[/THINK]8bc",
        ),
        (
            {
                **{"chat_template": R1, "eos": "<｜end▁of▁sentence｜>", "bos_token": "<｜begin▁of▁sentence｜>"},
                "added": ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
            },
            "<think>a</think>8<｜end▁of▁sentence｜><｜User｜>b<｜Assistant｜>",
            "<think>a</think>8b",
        ),
        (
            {
                **{"chat_template": GEMMA, "eos": "<eos>", "bos_token": "<bos>"},
                **{"special": ("<start_of_turn>", "<end_of_turn>", "<image>"), "added": ("\n\n", "<b>", "</b>")},
            },
            "<b>8</b>\n\n<image><end_of_turn>\n<start_of_turn>user",
            "<b>8</b>\n\n<image>\nuser",
        ),
        # a base model has no template to learn the marks from
        (
            {"eos": "<|endoftext|>", "special": ("<|im_end|>", "<|im_start|>", "<think>")},
            "<think>8<|im_end|>",
            "<think>8",
        ),
    ],
)
def test_turn_marks_of_the_known_kinds_go(kinds, text, left):
    assert decoded(byte_tokenizer(**kinds), text) == left


def test_what_ends_a_response_goes_unless_it_is_a_tag_or_a_word():
    tokenizer = byte_tokenizer(special=("<|finish|>", "<answer>", "</answer>"))
    ids = [*tokenizer.convert_tokens_to_ids(["<|finish|>", "</answer>"]), tokenizer("8")["input_ids"][0]]
    assert decoded(tokenizer, "<answer>8</answer><|finish|><|end|>") == "<answer>8</answer><|finish|>"
    assert decoded(tokenizer, "<answer>8</answer><|finish|><|end|>", ids) == "<answer>8</answer>"


def test_a_token_that_a_system_text_mentions_or_without_a_word_stays():
    told = "<|im_start|>system\nUse <step>, <a>\n<b> and end with <c><|im_end|>\n" + SHUT
    tokenizer = byte_tokenizer(
        special=("<|im_start|>", "<step>", "<a>", "<b>", "<c>", "\n"), eos="<|im_end|>", chat_template=told
    )
    assert decoded(tokenizer, "<step>1\n<a><b>2<c><|im_start|><|im_end|>") == "<step>1\n<a><b>2<c>"


def test_the_channels_of_a_response_stay():
    harmony = (
        "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
        "<|message|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    tokenizer = byte_tokenizer(
        special=("<|start|>", "<|channel|>", "<|message|>", "<|end|>"), eos="<|return|>", chat_template=harmony
    )
    said = "<|channel|>analysis<|message|>8<|end|><|start|>assistant<|channel|>final<|message|>9<|return|>"
    left = "<|channel|>analysis<|message|>8assistant<|channel|>final<|message|>9"
    assert decoded(tokenizer, said) == left


@pytest.mark.parametrize("clean_up", [True, False])
def test_spaces_are_those_of_the_tokens(clean_up):
    tokenizer = sentencepiece_tokenizer(special=("<think>", "</think>"))
    tokenizer.clean_up_tokenization_spaces = clean_up
    template = PromptTemplate(DataConfig(template="plain"), tokenizer)
    words = ["<s>", "▁the", "▁answer", "<think>", "▁is", "</s>", "</think>", "▁8", "8", "</s>"]
    assert template.decode(tokenizer.convert_tokens_to_ids(words)) == "the answer<think> is</think> 88"
    tokenizer = byte_tokenizer(special=("<think>",))
    tokenizer.clean_up_tokenization_spaces = clean_up
    assert decoded(tokenizer, "a , b . <think> n't ü<|end|>") == "a , b . <think> n't ü"


def test_stop_texts_and_streamed_pieces_see_the_same_text():
    tokenizer = byte_tokenizer(special=("<think>", "</think>", "<|im_start|>"), chat_template=OPEN, eos="<|im_end|>")
    template = PromptTemplate(DataConfig(), tokenizer)
    ids = tokenizer("ab</think>c<|im_start|>d<|im_end|>")["input_ids"]
    assert StopTexts(template.decode).ends_at(ids, 0, ["</think>"]) == 3
    assert StopTexts(template.decode).ends_at(ids, 0, ["cd"]) == 6
    assert Pieces(template.decode).add(ids, last=True) == ["a", "b", "</think>", "c", "", "d", ""]


@pytest.mark.parametrize(
    ("chat_template", "end"),
    [(OPEN, "assistant\n<think>\n"), (SHUT, "assistant\n"), (EMPTY, "assistant\n<think>\n\n</think>\n\n")],
)
def test_the_end_of_a_prompt_is_what_stands_behind_its_last_control_token(chat_template, end):
    tokenizer = byte_tokenizer(special=("<|im_start|>", "<think>"), eos="<|im_end|>", chat_template=chat_template)
    template = PromptTemplate(DataConfig(), tokenizer)
    assert template.end(template.encode("Write <think> tags.")) == end


def test_the_end_of_a_prompt_without_control_tokens_is_its_last_part():
    template = PromptTemplate(DataConfig(template="plain"), byte_tokenizer())
    assert template.end(template.encode("What is 4+4?\n<think>")) == "What is 4+4?\n<think>"
    assert template.end(template.encode("x" * 5000 + "<think>")) == "x" * 249 + "<think>"  # 256 tokens
