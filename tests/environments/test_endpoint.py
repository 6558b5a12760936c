"""Agents that talk to a run through OpenAI's API, with OpenAI's client and no import of ours."""

import asyncio
import json
import random
import zlib
from pathlib import Path

import httpx
import pytest
from test_episodes import consistent

from dapo.data.template import PromptTemplate
from dapo.environments.player import player_for
from dapo.records import Prompt
from episodes import Script, call, chat_tokenizer, settings

SUPPORT = Path(__file__).parents[1] / "support"
TOKENIZER = chat_tokenizer()


def played(agent, answer, *, prompts=1, think_s=0.0, tokenizer=TOKENIZER, limit_s=100, **changes):
    config = settings(environment__agent=f"{SUPPORT}/{agent}", **changes)
    template = PromptTemplate(config.data, tokenizer)

    async def work():
        async with player_for(config, template)() as player:

            async def one(number):
                script = Script(template, answer, number)

                async def ask(*given):
                    await asyncio.sleep(think_s)
                    return await script(*given)

                row = {"number": number, "task": number}
                prompt = Prompt(number, f"Go {number}", tuple(template.encode("Go")), "7", row)
                async with player.seat() as session:
                    return await player.play(session, prompt, ask), script, prompt

            return await asyncio.gather(*map(one, range(prompts)))

    return asyncio.run(asyncio.wait_for(work(), limit_s))


def test_an_agent_with_tools_of_its_own_leaves_a_whole_trace():
    answers = [call("add", a=1, b=2) + call("add", a=3, b=4), "so " + call("add", a=5, b=5), "the answer is 7"]
    ((result, script, prompt),) = played("openai_agents.py:with_tools", lambda context, turn: answers[turn])
    sample = consistent(result, script, prompt)
    assert not sample.more and [turn.stop for turn in sample.turns] == ["tool_calls", "tool_calls", "stop"]
    assert result.reward.correct and result.reward.value == 1.0 and sample.ended == "done"
    text = PromptTemplate(settings().data, TOKENIZER).text(script.contexts[0])
    assert '"name": "add"' in text and "Go 0" in text


def test_an_agent_knows_its_last_turn_and_may_go_on_in_it_without_tools():
    said = call("add", a=1, b=2)
    agent = "openai_agents.py:with_tools"
    ((result, script, prompt),) = played(agent, lambda *_: said, environment__max_turns=3)
    sample = consistent(result, script, prompt)
    assert [turn.stop for turn in sample.turns] == ["tool_calls", "tool_calls", "stop"]
    assert (sample.ended, sample.more, result.reward.correct) == ("done", (), False)


@pytest.mark.parametrize("agent", ["openai_agents.py:asynchronous", "openai_agents.py:streaming"])
def test_agents_of_other_kinds(agent):
    results = played(agent, lambda context, turn: "7", prompts=3)
    for one in results:
        sample = consistent(*one)
        assert sample.ended == "done" and len(sample.turns) == 2
        assert one[0].reward is None  # the recipe's reward scores the last answer


def test_an_agent_that_rewrites_its_history_begins_a_new_sequence():
    ((result, script, prompt),) = played("agents_for_tests.py:forgetful", lambda context, turn: f"answer {turn}")
    sample = consistent(result, script, prompt)
    assert len(sample.parts) == 3


@pytest.mark.parametrize(
    ("agent", "changes", "ended"),
    [
        ("agents_for_tests.py:endless", {"environment__max_turns": 3}, "max_turns"),
        ("agents_for_tests.py:endless", {"environment__max_turns": 1000}, "max_tokens"),
        ("agents_for_tests.py:sleeping", {"environment__timeout_s": 0.5}, "timeout"),
    ],
)
def test_caps_end_an_agent(agent, changes, ended):
    ((result, script, prompt),) = played(agent, lambda context, turn: "x" * 200, **changes)
    sample = consistent(result, script, prompt)
    assert sample.ended == ended and sample.turns and result.reward is None


def test_an_agent_that_fails_costs_its_episode_only():
    results = played("agents_for_tests.py:failing_once", lambda context, turn: "7", prompts=3)
    errors = [result.reward.error for result, *_ in results if result.reward and result.reward.error]
    assert len(errors) == 1 and "KeyError: 'tool' (" in errors[0] and "agents_for_tests.py" in errors[0]


def test_late_and_wrong_requests_are_refused(tmp_path):
    """The address of an episode that is over, and of none; another sampling than the run's; a message of images."""
    ((result, *_),) = played("agents_for_tests.py:tells_address", lambda context, turn: "7", environment__max_turns=2)
    told = json.loads(result.reward.extracted)
    assert [one[0] for one in told] == [*[400] * 7, 404, 200]
    assert "temperature: sampling is that of the run" in told[0][1]
    assert "only text is served" in told[2][1]


def test_a_request_after_the_end_is_refused_and_asks_nothing():
    config = settings(environment__agent="any.py:agent")
    template = PromptTemplate(config.data, TOKENIZER)

    async def work():
        from dapo.environments.endpoint import Endpoint
        from dapo.environments.episode import Episode, Limits

        script = Script(template, lambda *_: "x")
        async with Endpoint(1.0) as endpoint, httpx.AsyncClient() as client:
            body = {"model": "m", "messages": [{"role": "user", "content": "Go"}]}
            episode = Episode(template, script, config.environment, Limits(2000, 1000))
            with endpoint.address(episode) as url:
                first = await client.post(f"{url}/chat/completions", json=body)
                episode.end("timeout")
                over = await client.post(f"{url}/chat/completions", json=body)
            gone = await client.post(f"{url}/chat/completions", json=body)
        return first.status_code, over, gone.status_code, len(script.samples)

    first, over, gone, asked = asyncio.run(work())
    assert (first, over.status_code, gone, asked) == (200, 410, 410, 1)
    assert over.json()["error"]["message"] == "this episode is over: timeout"


def test_what_is_asked_at_the_end_is_given_up_and_no_part_of_the_episode():
    results = played(
        "agents_for_tests.py:with_a_thread", lambda *_: "7", prompts=2, think_s=0.1, environment__workers=1
    )
    for one in results:
        assert one[0].reward.value == 1.0
        assert consistent(*one).ended == "done" and len(one[1].samples) < 20


def test_a_client_that_goes_away_frees_the_engine():
    config = settings(environment__agent=f"{SUPPORT}/agents_for_tests.py:sleeping")
    template = PromptTemplate(config.data, TOKENIZER)
    begun, freed = asyncio.Event(), []

    async def ask(*given):
        begun.set()
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            freed.append(True)
            raise

    async def work():
        async with player_for(config, template)() as player:
            async with player.seat() as session:
                playing = asyncio.create_task(player.play(session, Prompt(0, "Go", (1,), "7"), ask))
                await begun.wait()
                playing.cancel()
                await asyncio.wait([playing])
            while not freed:
                await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(work(), 60))
    assert freed


@pytest.mark.parametrize("episodes", [50, pytest.param(1000, marks=pytest.mark.nightly)])
def test_random_episodes_through_the_endpoint_are_the_pieces_that_were_said(episodes):
    def answer(context, turn):
        at = random.Random(zlib.crc32(context.encode()))
        return "".join(at.choice("aé\U0001f600 z\n") for _ in range(at.randrange(30)))

    results = played("agents_for_tests.py:wandering", answer, prompts=episodes)
    samples = [consistent(*one) for one in results]
    assert sum(len(sample.more) for sample in samples) > episodes / 4
    assert sum(len(part.turns) > 1 for sample in samples for part in sample.parts) > episodes / 4


@pytest.mark.parametrize(
    ("name", "same", "other"),
    [
        *[("n", 1, 2), ("seed", None, 1), ("stop", [], ["x"]), ("top_p", 1, 0.5), ("logit_bias", {}, {"7": 1})],
        *[("logprobs", False, True), ("top_logprobs", 0, 3), ("parallel_tool_calls", True, False)],
        *[
            ("tool_choice", "auto", "required"),
            ("tool_choice", "none", {"type": "function", "function": {"name": "f"}}),
        ],
        *[("response_format", {"type": "text"}, {"type": "json_object"}), ("reasoning_effort", None, "low")],
        *[("max_completion_tokens", 5, 0), ("functions", [], [{"name": "f"}]), ("user", "me", None)],
    ],
)
def test_what_changes_the_answer_is_done_or_refused_by_name(client_of, name, same, other):
    assert client_of({name: same}).status_code == 200
    refused = client_of({name: other})
    if other is not None:
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith(name.replace("max_completion", "max"))


@pytest.fixture
def client_of():
    config = settings(environment__agent="any.py:agent")
    template = PromptTemplate(config.data, TOKENIZER)

    def asked(changes):
        async def work():
            from dapo.environments.endpoint import Endpoint
            from dapo.environments.episode import Episode, Limits

            async with Endpoint(1.0) as endpoint, httpx.AsyncClient() as client:
                body = {"model": "m", "messages": [{"role": "user", "content": "Go"}], **changes}
                script = Script(template, lambda *_: "x")
                with endpoint.address(Episode(template, script, config.environment, Limits(2000, 1000))) as url:
                    return await client.post(f"{url}/chat/completions", json=body)

        return asyncio.run(work())

    return asked
