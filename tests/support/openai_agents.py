"""Agents as anybody would write them: OpenAI's client, and nothing of this package."""

import json

from openai import AsyncOpenAI, OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]


def client_of(base_url, kind=OpenAI):
    return kind(base_url=base_url, api_key="none", max_retries=0)


def with_tools(base_url, row):
    client = client_of(base_url)
    messages = [{"role": "user", "content": row["prompt"]}]
    given = {"model": "policy", "messages": messages, "tools": TOOLS}
    while True:
        found = client.chat.completions.create(**given)
        message = found.choices[0].message
        given["tool_choice"] = "none" if found.turns_left == 1 else "auto"
        if not message.tool_calls:
            return {"value": 1.0, "correct": row["answer"] in message.content}
        messages.append(message.model_dump(exclude_none=True))
        for one in message.tool_calls:
            total = sum(json.loads(one.function.arguments).values())
            messages.append({"role": "tool", "tool_call_id": one.id, "content": str(total)})


async def asynchronous(base_url, row):
    client = client_of(base_url, AsyncOpenAI)
    messages = [{"role": "user", "content": row["prompt"]}]
    for _ in range(2):
        found = await client.chat.completions.create(model="policy", messages=messages, max_tokens=50)
        messages += [{"role": "assistant", "content": found.choices[0].message.content}, messages[0]]


def streaming(base_url, row):
    client = client_of(base_url)
    messages = [{"role": "user", "content": [{"type": "text", "text": row["prompt"]}]}]
    for _ in range(2):
        parts = client.chat.completions.create(model="policy", messages=messages, stream=True)
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        messages += [{"role": "assistant", "content": text}, messages[0]]


def guess(base_url, row):
    """One turn; right if the answer is the row's."""
    client = client_of(base_url)
    found = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": row["prompt"]}])
    return (found.choices[0].message.content or "").strip() == row["answer"]


def short(base_url, row):
    """Paid for an answer that ends by itself, the shorter the better."""
    client = client_of(base_url)
    found = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": row["prompt"]}])
    choice = found.choices[0]
    return float(choice.finish_reason == "stop") - 0.02 * len(choice.message.content)
