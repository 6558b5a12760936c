"""Agents with plain HTTP, whose processes start at once."""

import json
import random
import time
import urllib.request


def said(base_url, messages):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


def forgetful(base_url, row):
    for number in range(3):
        messages = [{"role": "system", "content": f"part {number}"}, {"role": "user", "content": row["prompt"]}]
        said(base_url, messages)


def endless(base_url, row):
    messages = [{"role": "user", "content": row["prompt"]}]
    while True:
        messages += [{"role": "assistant", "content": said(base_url, messages)}, messages[0]]


def sleeping(base_url, row):
    said(base_url, [{"role": "user", "content": "x"}])
    time.sleep(1000)


def failing_once(base_url, row):
    said(base_url, [{"role": "user", "content": "x"}])
    return {}["tool"] if row["number"] == 1 else 1.0


def tells_address(base_url, row):
    import httpx

    url = f"{base_url}/chat/completions"
    message = {"role": "user", "content": "x"}
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    asked = [
        {"messages": [message], "temperature": 0.3},
        {"messages": [message], "n": 4},
        {"messages": [image]},
        {"messages": []},
        {"messages": [message], "max_tokens": -1},
        {"messages": [message], "tools": "add"},
        {"messages": [message, {"role": "assistant", "tool_calls": "x"}]},
    ]
    told = [httpx.post(url, json=body) for body in asked]
    told += [httpx.post(f"{base_url}/completions", json={}), httpx.post(url, json={"messages": [message], "n": 1})]
    return {"value": 1.0, "extracted": json.dumps([[one.status_code, one.text] for one in told])}


def wandering(base_url, row):
    """Goes on, begins anew, or asks twice for the same."""
    at = random.Random(row["number"])
    messages = [{"role": "user", "content": row["prompt"]}]
    for _ in range(at.randrange(1, 6)):
        answer = said(base_url, messages)
        how = at.randrange(5)
        if how == 0:
            messages = [messages[0] | {"content": f"again {at.random()}"}]
        elif how > 1:
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "é" * at.randrange(9)}]
