"""Reward models with random weights and real architectures: the score of a response is that of the model alone."""

import asyncio
import json
import math
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import processors

from dapo.config import ComposeReward, ModelReward
from dapo.config.composed_reward import Part
from dapo.errors import RewardError
from dapo.records import Prompt
from dapo.reward.build import make_scorer
from dapo.reward.check import running
from dapo.reward.model.network import load_network
from dapo.reward.model.scorer import _load, pick_alike
from dapo.reward.model.text import PairText
from data.tokenizers_for_tests import CHAT, CHAT_WITH_BOS, char_tokenizer

VOCAB = 99  # the 98 tokens of the test tokenizer, and one to pad with
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "num_labels": 1,
}
GPT2 = {"model_type": "gpt2", "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
KINDS = {
    "llama, no padding token": SMALL | {"model_type": "llama", "num_key_value_heads": 2},
    "llama, padding": SMALL | {"model_type": "llama", "num_key_value_heads": 2, "pad_token_id": 98},
    "qwen2, padding is the end of a text": SMALL | {"model_type": "qwen2", "num_key_value_heads": 2, "pad_token_id": 1},
    "mistral": SMALL | {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 8, "pad_token_id": 0},
    "gpt2": GPT2 | {"num_labels": 1},
    "gpt2, padding": GPT2 | {"num_labels": 1, "pad_token_id": 1},
    "opt": SMALL | {"model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 32, "pad_token_id": 98},
    "bert": SMALL | {"model_type": "bert", "pad_token_id": 98},
    "roberta": SMALL | {"model_type": "roberta", "max_position_embeddings": 131, "pad_token_id": 2},
}
RESPONSES = ["4", "", "the sum is 4, since 2 and 2 is 4", "no", "4 4 4 4 4 4 4 4 4 4 4 4 4 4 4 4 4 4", "5!"]


def save(folder, settings, auto="AutoModelForSequenceClassification", tokenizer=None, seed=0):
    """A model with large random weights in ``folder``; returns the model."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(**settings)
    model = getattr(transformers, auto).from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10.0 if settings["model_type"] in ("bert", "roberta") else 6.0)
    model.save_pretrained(folder)
    # in a folder of its own: beside a Qwen2 model, Transformers would make a Qwen2 tokenizer of it
    (tokenizer or char_tokenizer(chat_template=CHAT)).save_pretrained(folder / "tokenizer")
    return model


def save_with_head(folder, value):
    """A classifier whose head has this number everywhere."""
    save(folder, KINDS["gpt2"])
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"score.weight": torch.full((1, 32), value)}, file, {"format": "pt"})


def config(folder, **options):
    sizes = {"max_length": 128, "tokens_per_batch": 512}
    return ModelReward(**{"kind": "model", "path": str(folder), "tokenizer": f"{folder}/tokenizer", **sizes, **options})


def prompt(text="2+2="):
    return Prompt(0, text, (), "4")


def score_all(settings, responses, one_by_one=False):
    async def run():
        scorer = make_scorer(settings)
        try:
            if one_by_one:
                return [await scorer.score(prompt(), r) for r in responses]
            return await asyncio.gather(*(scorer.score(prompt(), r) for r in responses))
        finally:
            await scorer.close()

    return asyncio.run(run())


def chat_ids(response):
    """[user]2+2=<e>[assistant]response<e>, a token for each character: 0 <s>, 1 <e>, then from the space on."""

    def ids(text):
        return [2 + ord(c) - 32 for c in text]

    return [*ids("[user]2+2="), 1, *ids(f"[assistant]{response}"), 1]


@torch.inference_mode()
def alone(model, ids):
    """What Transformers itself gives for one text, without any padding."""
    return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_score_is_that_of_the_model_alone_whatever_the_batch(tmp_path, kind):
    model = save(tmp_path, KINDS[kind])
    together = score_all(config(tmp_path), RESPONSES)
    apart = score_all(config(tmp_path), RESPONSES, one_by_one=True)
    expected = [alone(model, chat_ids(r)) for r in RESPONSES]
    assert max(expected) - min(expected) > 0.01  # the models tell the responses apart
    for ours, single, theirs in zip(together, apart, expected, strict=True):
        assert ours.error is None and ours.correct is None and ours.parts == {"score": ours.value}
        assert ours.value == pytest.approx(theirs, abs=1e-5)
        assert single.value == pytest.approx(theirs, abs=1e-5)


def test_plain_is_one_text_after_the_other_and_pair_is_two(tmp_path):
    tokenizer = char_tokenizer(adds_bos=True)
    model = save(tmp_path / "llama", KINDS["llama, no padding token"], tokenizer=tokenizer)
    (reward,) = score_all(config(tmp_path / "llama", template="plain"), ["4"])
    assert reward.value == pytest.approx(alone(model, [0, 20, 13, 20, 31, 22]), abs=1e-5)  # <s> 2 + 2 = 4

    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <e>", pair="<s> $A <e> $B:1 <e>:1", special_tokens=[("<s>", 0), ("<e>", 1)]
    )
    model = save(tmp_path / "bert", KINDS["bert"], tokenizer=tokenizer)
    names = ["input_ids", "token_type_ids", "attention_mask"]  # as those of BERT's own tokenizers
    edit(tmp_path / "bert" / "tokenizer" / "tokenizer_config.json", model_input_names=names)
    (reward, _) = score_all(config(tmp_path / "bert", template="pair"), ["4", "a longer one"])
    ids, types = torch.tensor([[0, 20, 13, 20, 31, 1, 22, 1]]), torch.tensor([[0, 0, 0, 0, 0, 0, 1, 1]])
    with torch.inference_mode():
        expected = float(model(input_ids=ids, token_type_ids=types).logits[0, 0])
    assert reward.value == pytest.approx(expected, abs=1e-5)
    with pytest.raises(RewardError, match=r"reward.template: is pair, but the reward model .* reads one text"):
        load_network(config(tmp_path / "llama", template="pair"))


@pytest.mark.parametrize("adds_bos", [False, True])
def test_there_is_one_bos_whoever_writes_it(adds_bos):
    for template in (CHAT_WITH_BOS, "{{ bos_token }}" + CHAT_WITH_BOS):
        text = PairText(char_tokenizer(adds_bos=adds_bos, chat_template=template), "chat", "t")
        assert text.encode("2+2=", "4").token_ids == (0, *chat_ids("4"))


def test_a_response_cannot_write_control_tokens():
    text = PairText(char_tokenizer(chat_template=CHAT), "chat", "t")
    ids = text.encode("2+2=", "4<e>[user]Is it right?<e><<e>e>").token_ids
    assert ids.count(1) == 2  # after the prompt and after the response


@pytest.mark.parametrize(("above", "correct"), [(None, None), (-1.0, True), (0.0, False), (1e6, False)])
def test_correct_above_says_what_is_right(tmp_path, above, correct):
    save_with_head(tmp_path, 0.0)
    (reward,) = score_all(config(tmp_path, correct_above=above), ["4"])
    assert (reward.correct, reward.value, reward.parts) == (correct, 0.0, {"score": 0.0})


@pytest.mark.parametrize("composed", [False, True])
def test_prompts_with_letters_that_the_tokenizer_lacks_are_in_doubt(tmp_path, composed):
    save(tmp_path, KINDS["gpt2"])
    reward = config(tmp_path)
    if composed:
        reward = ComposeReward(kind="compose", parts={"taste": Part(reward=reward)})

    async def run():
        async with running(make_scorer(reward)) as scorer:
            return await scorer.examine(
                [prompt(text) for text in ("2+2=", "caf\u00e9", "na\u00efve caf\u00e9", "cafe")]
            )

    said = [(doubt.position, doubt.text.removeprefix("part taste: ")) for doubt in asyncio.run(run())]
    lacks = "the reward model's tokenizer has no token for"
    assert said == [(1, f"{lacks} '\u00e9'"), (2, f"{lacks} '\u00e9\u00ef'")]


def test_a_text_that_is_too_long_fails_alone(tmp_path):
    save(tmp_path, KINDS["gpt2"])
    # around the response stand 10 + 1 + 11 + 1 tokens
    long, most = score_all(config(tmp_path, max_length=40), ["x" * 18, "x" * 17])
    assert long.error == "reward model: prompt and response are 41 tokens, more than reward.max_length=40"
    assert long.correct is None and most.error is None


def test_a_score_that_is_no_number_is_a_failed_one(tmp_path):
    save_with_head(tmp_path, 3e38)
    rewards = score_all(config(tmp_path), ["4"])
    assert rewards[0].error is not None and "not a finite number" in rewards[0].error


# what is refused


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def drop(folder, name):
    file = folder / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if k != name}, file, {"format": "pt"})


def test_a_model_without_a_trained_head_is_refused_and_not_given_a_random_one(tmp_path):
    save(tmp_path, {k: v for k, v in KINDS["llama, padding"].items() if k != "num_labels"}, "AutoModelForCausalLM")
    with pytest.raises(RewardError, match=r"language model \(LlamaForCausalLM\), not a reward model"):
        load_network(config(tmp_path))
    # also where the config claims that it is one
    edit(
        tmp_path / "config.json",
        architectures=["LlamaForSequenceClassification"],
        id2label={"0": "x"},
        label2id={"x": 0},
    )
    with pytest.raises(RewardError, match=r"1 missing weights, such as score\.weight"):
        load_network(config(tmp_path))


@pytest.mark.parametrize(
    "name", ["classifier.bias", "bert.pooler.dense.weight", "bert.encoder.layer.1.output.dense.bias"]
)
def test_a_model_that_lacks_any_weight_is_refused(tmp_path, name):
    save(tmp_path, KINDS["bert"])
    drop(tmp_path, name)
    with pytest.raises(RewardError, match="1 missing weights, such as " + name):
        load_network(config(tmp_path))


def test_weights_that_the_config_has_no_place_for_are_refused(tmp_path):
    save(tmp_path, KINDS["bert"])
    edit(tmp_path / "config.json", num_hidden_layers=1)
    with pytest.raises(RewardError, match=r"16 unexpected weights, such as bert\.encoder\.layer\.1\."):
        load_network(config(tmp_path))


def test_several_outputs_are_refused(tmp_path):
    save(tmp_path, KINDS["bert"] | {"num_labels": 3})
    with pytest.raises(RewardError, match="has 3 outputs, where a reward model has one"):
        load_network(config(tmp_path))


def test_weights_that_are_no_numbers_are_refused(tmp_path):
    model = save(tmp_path, KINDS["bert"])
    with torch.no_grad():
        model.classifier.weight[0, 3] = math.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(RewardError, match=r"weights classifier\.weight hold NaN or infinity"):
        load_network(config(tmp_path))


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(RewardError, match=f"^reward model {tmp_path}/none: no such folder"):
        load_network(config(tmp_path / "none"))
    save(tmp_path / "model", KINDS["gpt2"])
    (tmp_path / "model" / "model.safetensors").write_bytes(b"half")
    with pytest.raises(RewardError, match=f"^reward model {tmp_path}/model: exists but cannot be loaded"):
        load_network(config(tmp_path / "model"))
    with pytest.raises(RewardError, match=f"^reward tokenizer {tmp_path}/none: no such folder"):
        load_network(config(tmp_path / "model", tokenizer=str(tmp_path / "none")))
    with pytest.raises(RewardError, match=r"there are no tokenizer files; name another folder in reward\.tokenizer"):
        load_network(config(tmp_path / "model", tokenizer=None))


def test_the_tokenizer_is_that_of_the_model_unless_another_is_named(tmp_path):
    model = save(tmp_path, KINDS["gpt2"])
    char_tokenizer(chat_template=CHAT).save_pretrained(tmp_path)
    (reward,) = score_all(config(tmp_path, tokenizer=None), ["4"])
    assert reward.value == pytest.approx(alone(model, chat_ids("4")), abs=1e-5)


def test_a_tokenizer_without_chat_template_is_refused_with_the_way_out(tmp_path):
    save(tmp_path, KINDS["gpt2"], tokenizer=char_tokenizer())
    with pytest.raises(RewardError, match=r"no chat template; use reward\.template=plain"):
        load_network(config(tmp_path))
    refuses = "{{ raise_exception('no assistant here') }}"
    save(tmp_path, KINDS["gpt2"], tokenizer=char_tokenizer(chat_template=refuses))
    with pytest.raises(RewardError, match="refuses prompt and response: no assistant here"):
        load_network(config(tmp_path))


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    save(tmp_path, KINDS["gpt2"] | {"vocab_size": 90})
    with pytest.raises(RewardError, match="has token 97, but the model knows only 90 tokens"):
        load_network(config(tmp_path))


@pytest.mark.parametrize(("kind", "limit"), [("gpt2", 128), ("roberta", 128)])
def test_more_tokens_than_the_model_has_positions_are_refused(tmp_path, kind, limit):
    save(tmp_path, KINDS[kind])
    with pytest.raises(RewardError, match=f"takes at most {limit} tokens; use reward.max_length={limit}"):
        load_network(config(tmp_path, max_length=limit + 1))
    (reward,) = score_all(config(tmp_path, max_length=limit), ["x" * (limit - 23)])
    assert reward.error is None


def test_positions_that_yarn_stretches_count(tmp_path):
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
    save(
        tmp_path,
        KINDS["qwen2, padding is the end of a text"] | {"max_position_embeddings": 128, "rope_parameters": rope},
    )
    (reward,) = score_all(config(tmp_path, max_length=256), ["x" * 200])
    assert reward.error is None
    with pytest.raises(RewardError, match="takes at most 256 tokens"):
        load_network(config(tmp_path, max_length=257))


def test_a_model_whose_batches_are_not_its_own_scores_is_refused(tmp_path, monkeypatch):
    from transformers import GPT2Model

    def from_the_end(self, *args, **kwargs):
        """As if the positions of a text were counted from the end of its batch."""
        ids = args[0] if args else kwargs["input_ids"]
        kwargs["position_ids"] = torch.arange(ids.shape[1]).flip(0)[None]
        return forward(self, *args, **kwargs)

    save(tmp_path, KINDS["gpt2"])
    load_network(config(tmp_path))
    forward = GPT2Model.forward
    monkeypatch.setattr(GPT2Model, "forward", from_the_end)
    with pytest.raises(RewardError, match="this architecture cannot be scored in batches here"):
        load_network(config(tmp_path))


def test_a_text_that_no_batch_can_hold_is_refused_at_parse():
    with pytest.raises(ValueError, match="tokens_per_batch: 100 cannot hold one text of max_length=101; use 101"):
        config("x", max_length=101, tokens_per_batch=100)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_reward_model_is_on_a_gpu_where_there_is_one(tmp_path, monkeypatch):
    """On the processor 1,024 responses took 210 s of a step whose sampling took 5."""
    save(tmp_path, KINDS["gpt2"])
    load_network(config(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        load_network(config(tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_said(tmp_path):
    with pytest.raises(RewardError, match=r"use reward\.device=cpu"):
        load_network(config(tmp_path, device="cuda"))


# batches and time


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 200))
def test_a_batch_holds_the_oldest_is_within_its_budget_and_cannot_be_larger(lengths, budget):
    places = pick_alike(lengths, budget)
    assert 0 in places and len(set(places)) == len(places)
    padded = max(lengths[p] for p in places) * len(places)
    assert padded <= budget or places == [0]
    # it is made of neighbours in length
    low, high = min(lengths[p] for p in places), max(lengths[p] for p in places)
    assert all(p in places for p, length in enumerate(lengths) if low < length < high)


def test_a_batch_takes_those_that_are_nearest_in_length():
    #        oldest
    lengths = [10, 50, 9, 11, 1, 10, 60]
    assert sorted(pick_alike(lengths, 44)) == [0, 2, 3, 5]  # 4 x 11 tokens
    assert sorted(pick_alike(lengths, 43)) == [0, 2, 5]
    assert sorted(pick_alike(lengths, 10**6)) == [0, 1, 2, 3, 4, 5, 6]
    assert pick_alike([100, 1, 1], 50) == [0]


class Slow:
    """A network whose batches last until they are let go; takes note of the batches."""

    def __init__(self, network):
        self.text, self.inner = network.text, network
        self.go, self.batches = threading.Event(), []

    def score(self, items):
        self.batches.append([item.length for item in items])
        assert self.go.wait(20)
        return self.inner.score(items)


def test_batches_are_padded_within_tokens_per_batch_and_the_loop_goes_on(tmp_path, monkeypatch):
    save(tmp_path, KINDS["gpt2"])
    slow = Slow(load_network(config(tmp_path)))
    monkeypatch.setattr("dapo.reward.model.scorer._load", lambda settings: slow)

    async def run():
        scorer = make_scorer(config(tmp_path, tokens_per_batch=128))
        calls = [asyncio.create_task(scorer.score(prompt(), "x" * (k * 7 % 40))) for k in range(40)]
        turns = 0
        while not slow.batches or turns < 20:
            await asyncio.sleep(0.001)
            turns += 1
        assert not any(call.done() for call in calls)
        slow.go.set()
        rewards = await asyncio.gather(*calls)
        await scorer.close()
        return rewards

    rewards = asyncio.run(run())
    assert all(reward.error is None for reward in rewards)
    assert all(max(batch) * len(batch) <= 128 for batch in slow.batches)
    assert sum(map(len, slow.batches)) == 40
    one_by_one = score_all(config(tmp_path), ["x" * (k * 7 % 40) for k in range(40)], one_by_one=True)
    assert [r.value for r in rewards] == pytest.approx([r.value for r in one_by_one], abs=1e-5)


def test_a_batch_that_takes_too_long_fails_and_later_ones_are_scored(tmp_path, monkeypatch):
    save(tmp_path, KINDS["gpt2"])
    slow = Slow(load_network(config(tmp_path)))
    monkeypatch.setattr("dapo.reward.model.scorer._load", lambda settings: slow)

    async def run():
        scorer = make_scorer(config(tmp_path, timeout_s=0.3))
        started = time.perf_counter()
        late = await scorer.score(prompt(), "4")
        behind = await scorer.score(prompt(), "4")
        assert time.perf_counter() - started < 10
        slow.go.set()
        good = await scorer.score(prompt(), "4")
        await scorer.close()
        return late, behind, good

    late, behind, good = asyncio.run(run())
    assert late.error == (
        "reward model: timed out after 0.3 s in a batch of 24 tokens; raise reward.timeout_s or lower "
        "reward.tokens_per_batch=512"
    )
    assert behind.error is not None and "busy for another 0.3 s" in behind.error
    assert good.error is None and len(slow.batches) == 2


def test_two_models_load_one_after_the_other(monkeypatch):
    """Parts of a composed reward begin at once, and threads that import Transformers at once find half of it."""
    inside, seen = [], []

    def slow(config):
        inside.append(config)
        seen.append(len(inside))
        time.sleep(0.02)
        inside.pop()

    monkeypatch.setattr("dapo.reward.model.network.load_network", slow)
    threads = [threading.Thread(target=_load, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1, 1, 1]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA"), "out of memory; lower reward.tokens_per_batch=512"),
        (IndexError("a\nb"), "IndexError: a"),
    ],
)
def test_a_network_that_fails_is_a_failed_score(tmp_path, monkeypatch, error, said):
    save(tmp_path, KINDS["gpt2"])
    network = load_network(config(tmp_path))

    def fails(items):
        raise error

    network.score = fails
    monkeypatch.setattr("dapo.reward.model.scorer._load", lambda settings: network)
    (reward,) = score_all(config(tmp_path), ["4"])
    assert reward.error == f"reward model: {said}"


def test_closing_does_not_wait_for_a_batch(tmp_path, monkeypatch):
    save(tmp_path, KINDS["gpt2"])
    slow = Slow(load_network(config(tmp_path)))
    monkeypatch.setattr("dapo.reward.model.scorer._load", lambda settings: slow)

    async def run():
        scorer = make_scorer(config(tmp_path))
        calls = [asyncio.create_task(scorer.score(prompt(), "x" * k)) for k in range(30)]
        while not slow.batches:
            await asyncio.sleep(0.001)
        await asyncio.wait_for(scorer.close(), 5)
        return await asyncio.gather(*calls, return_exceptions=True)

    try:
        assert all(isinstance(outcome, asyncio.CancelledError | RuntimeError) for outcome in asyncio.run(run()))
    finally:
        slow.go.set()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_on_a_gpu_are_those_of_the_processor(tmp_path, dtype):
    save(tmp_path, KINDS["llama, no padding token"])
    here = score_all(config(tmp_path, device="cpu"), RESPONSES)
    there = score_all(config(tmp_path, device="cuda", compute_dtype=dtype), RESPONSES)
    scale = max(abs(reward.value) for reward in here)
    for ours, theirs in zip(there, here, strict=True):
        assert ours.error is None
        assert ours.value == pytest.approx(theirs.value, abs=(1e-3 if dtype == "float32" else 0.1) * scale)
