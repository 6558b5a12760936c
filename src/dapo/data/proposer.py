"""Prompts that a language model behind the OpenAI protocol makes up, for the policy to half solve.

Consumes its proposals, lines of JSON with ``prompt`` and ``answer``; produces rows. A proposal is taken if nobody has
seen it (training rows, evaluation rows, earlier proposals) and its answer holds: the user's program says so, or the
model itself comes to it again, twice. Its reward is 1 - |2p - 1| for a pass rate p of the policy: the best ones are
shown to the model as examples, and all are written to a file for whoever trains it. One request is under way at a time,
in a thread; a model that repeats itself or answers nothing useful is named and asked no more."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any

from dapo.config.data import ProposerConfig
from dapo.data.clean import number_of
from dapo.data.difficulty import right_and_wrong
from dapo.data.overlap import exact_key, find_overlap
from dapo.data.procedural import final_answer
from dapo.data.rows import BadRow, Keys, Row, check_row
from dapo.errors import ConfigError, extra
from dapo.records import Group
from dapo.util.files import append_lines, parse_json, writing
from dapo.util.user_code import load_named

Proposals = list[tuple[str, dict[str, str]]]
Ask = Callable[[str], str]
"""What the model says to a message. Raises an error: nothing."""

_AHEAD, _EXAMPLES = 16, 6
_FRUITLESS = 40
"""Proposals and failed requests in a row without one that is taken, after which the model is asked no more."""
_PROPOSE = """Make up {count} new problems, each with one short final answer that can be checked. A student is to solve
each of them about every second time. Write one JSON object per line and nothing else: {{"prompt": ..., "answer": ...}}
{examples}"""
_SOLVE = "{prompt}\n\nThink step by step. End with a last line of the form Answer: $Answer."


def ask_endpoint(config: ProposerConfig) -> Ask:
    """Raises UserError: it needs an extra, or the key is not in the environment."""
    with extra("remote", "data.proposer"):
        from dapo.util.http.connections import HttpConnections, token_in, whole
    token = token_in(config.token_env, "data.proposer.token_env", ConfigError)

    async def asked(text: str) -> str:
        connections = HttpConnections(token, 1)
        body = {"model": config.model, "messages": [{"role": "user", "content": text}]}
        try:
            async with (
                asyncio.timeout(config.timeout_s),
                connections.send("POST", f"{config.url}/chat/completions", json.dumps(body).encode()) as reply,
            ):
                content = await whole(reply, 2**22)
            return str(json.loads(content)["choices"][0]["message"]["content"])
        finally:
            await connections.close()

    return lambda text: asyncio.run(asked(text))


class Proposer:
    kind = "proposer"

    def __init__(
        self,
        config: ProposerConfig,
        seen: Iterable[str],
        held: Sequence[str],
        warn: Callable[[str], None],
        ask: Ask | None = None,
    ) -> None:
        """``seen``: training prompts. ``held``: those to evaluate on. ``ask``: in place of the endpoint."""
        self.share, self._config, self._held, self._warn = config.share, config, held, warn
        self._ask = ask or ask_endpoint(config)
        try:
            Path(config.feed or os.devnull).open("a").close()
        except OSError as error:
            raise ConfigError(f"data.proposer.feed: cannot write {config.feed}: {error.strerror}") from None
        self._holds = load_named(config.verify, "data.proposer.verify") if config.verify else self._comes_again
        self._seen = {exact_key(text) for text in seen}
        self._own: list[int] = []
        self._ready: deque[dict[str, str]] = deque()
        self._best: list[tuple[float, str, str]] = []
        self._counts: Counter[str] = Counter()
        self._rewards: deque[float] = deque(maxlen=100)
        self._fruitless = 0
        self._request: Future[Proposals] | None = None

    def take(self) -> Row | None:
        """The next proposal; None: none is ready. Never waits."""
        if self._request is not None and self._request.done():
            self._hear(self._request)
            self._request = None
        over = self._counts["asked"] >= self._config.max_requests or self._fruitless >= _FRUITLESS
        if self._request is None and not over and len(self._ready) < _AHEAD:
            self._counts["asked"] += 1
            self._request = Future()
            Thread(target=self._work, args=[self._request], name="dapo-proposer", daemon=True).start()
        if not self._ready:
            return None
        found = self._ready.popleft()
        return Row(found["prompt"], found["answer"], {}, "data.proposer")

    def refuse(self, fault: str) -> None:
        self._counts["bad"] += 1

    def _work(self, request: Future[Proposals]) -> None:
        """In a thread that the end of the process does not wait for."""
        try:
            request.set_result(self._propose())
        except BaseException as error:  # such as that the user's program wants to exit
            request.set_exception(error)

    def _propose(self) -> Proposals:
        """What became of each proposal of one reply, and the proposal."""
        shown = [json.dumps({"prompt": prompt, "answer": answer}) for _, prompt, answer in self._best]
        examples = "\n".join(["Good ones were:", *shown]) if shown else ""
        reply = self._ask(_PROPOSE.format(count=4, examples=examples))
        found, taken = Proposals(), set[int]()
        for line in [line for line in reply.splitlines() if line.strip().startswith("{")][:8]:
            try:
                row = check_row(parse_json(line), Keys(), "")
                one = {"prompt": row.text, "answer": row.answer or ""}
            except (ValueError, BadRow):
                found.append(("bad", {}))
                continue
            key = exact_key(one["prompt"])
            if key in self._seen or key in taken:
                found.append(("repeated", one))
            elif find_overlap([enumerate(self._held)], [[(0, one["prompt"])]]):
                found.append(("evaluation", one))
            else:
                taken.add(key)
                found.append(("accepted" if self._holds(one["prompt"], one["answer"]) else "wrong", one))
        return found or [("bad", {})]

    def _comes_again(self, prompt: str, answer: str) -> bool:
        """In text or as a number; the math reward bounds its time in main threads only."""
        replies = (final_answer(self._ask(_SOLVE.format(prompt=prompt))) for _ in range(2))
        wanted = number_of(answer)
        return all(said == answer or (wanted is not None and number_of(said) == wanted) for said in replies)

    def _hear(self, request: Future[Proposals]) -> None:
        fault = request.exception()
        for what, one in [("failed", {})] if fault else request.result():
            self._counts[what] += 1
            self._fruitless = 0 if what == "accepted" else self._fruitless + 1
            if what == "accepted":
                self._own.append(exact_key(one["prompt"]))
                self._seen.add(self._own[-1])
                self._ready.append(one)
        if self._fruitless >= _FRUITLESS:
            refused = ("repeated", "wrong", "evaluation", "bad", "failed")
            kinds = ", ".join(f"{name} {self._counts[name]}" for name in refused)
            last = f"; the last request: {type(fault).__name__}: {fault}" if fault else ""
            self._warn(
                f"data.proposer: {self._config.model} is asked no more: {_FRUITLESS} proposals in a row were of no use "
                f"(in all: accepted {self._counts['accepted']}, {kinds}){last}"
            )

    def heard(self, groups: Sequence[Group]) -> None:
        """Reward the proposals by what the policy made of them."""
        lines = []
        for group in [group for group in groups if group.scored]:
            right, wrong = right_and_wrong(group)
            rate = float(right / (right + wrong))
            reward = 1 - abs(2 * rate - 1)
            self._rewards.append(reward)
            one = (reward, group.prompt.text, group.prompt.answer or "")
            self._best = sorted({*self._best, one}, reverse=True)[:_EXAMPLES]
            self._counts["drawn"] += 1
            lines.append({"prompt": one[1], "answer": one[2], "pass_rate": rate, "reward": reward})
        if self._config.feed and lines:
            with writing(Path(self._config.feed)):
                append_lines(Path(self._config.feed), lines)

    def metrics(self) -> dict[str, float]:
        names = ("asked", "accepted", "repeated", "wrong", "evaluation", "bad", "failed", "drawn")
        reward = {"proposer/reward": sum(self._rewards) / len(self._rewards)} if self._rewards else {}
        return {**{f"proposer/{name}": float(self._counts[name]) for name in names}, **reward}

    def state(self) -> dict[str, Any]:
        return {
            **{"ready": list(self._ready), "best": list(self._best), "counts": dict(self._counts)},
            **{"rewards": list(self._rewards), "fruitless": self._fruitless, "own": [str(key) for key in self._own]},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`; a request that was under way is lost."""
        self._ready, self._best = deque(state["ready"]), [tuple(one) for one in state["best"]]
        self._counts, self._fruitless = Counter(state["counts"]), state["fruitless"]
        self._rewards.extend(state["rewards"])
        self._own = [int(key) for key in state["own"]]
        self._seen.update(self._own)
