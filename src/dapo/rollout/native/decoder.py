"""Continuous batching: the decoder of the native engine, over a paged cache.

A GPU works in stretches of several dozen steps, during which nobody looks at it. Between two stretches the host does
what there is to do: take out what has finished, start what waits, hand out pages. Samples of a stretch are built from
its arrays while the device is at the next one. A CPU is looked at after every step, and its cache has no pages.

Pages run out before rows do when responses are long. Then prompts that were computed ahead are dropped first, and
after them the youngest sequences are *preempted*: their pages are released, and they start again later from the tokens
they had, none of which is drawn a second time. The oldest sequence always goes on, so everything finishes.

Synchronous and single-threaded; ``engine.py`` runs it in a thread. It never touches a tensor itself: the
:class:`~dapo.rollout.native.runner.Runner` does, and a fake one in the tests.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from dapo.records import Sample
from dapo.rollout.engine import Draft, EngineError, Request
from dapo.rollout.native.checks import check_request
from dapo.rollout.native.in_flight import SampleInFlight, Told, Waiting, draw_ahead
from dapo.rollout.native.pages import BlockTables, PageAllocator, PageArray, minimum_pages, pages_for
from dapo.rollout.native.runner import Fetch, RowStart, Runner, Variant
from dapo.rollout.native.stopping import StopTexts

STRETCH = 32  # steps between two looks: at 4 ms a step the host's 4 ms are 3%, and a finished row idles for 16 steps
PREFILL_TOKENS = 8192  # prompts computed in one pass: enough to fill a card


class Decoder:
    """Decodes samples for requests; each result carries the key that its request was submitted under."""

    def __init__(
        self,
        runner: Runner,
        *,
        pages: int,
        page_tokens: int,
        max_sequence_tokens: int,
        vocabulary: int,
        stop_token_ids: Sequence[int],
        stop_texts: StopTexts | None = None,
        stretch: int = STRETCH,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        """
        Args:
            runner: the device's side.
            pages, page_tokens: of the pool, page 0 included. A page of 0 tokens: the runner has no pages but room for
                each row, and no prompt is computed before it can start.
            max_sequence_tokens: longest prompt and response together.
            vocabulary: token ids are below it.
            stop_token_ids: each ends a response and belongs to it.
            stretch: steps between two looks at the device.
            prefill_tokens: of prompts that are computed in one pass (a longer one goes alone); below 0: each alone.

        Raises EngineError: the pool cannot hold a single sequence."""
        needed = minimum_pages(max_sequence_tokens, page_tokens)
        if pages < needed:
            raise EngineError(
                f"the cache has {pages} pages of {page_tokens} tokens, but a single sequence of {max_sequence_tokens} "
                f"tokens takes {needed}"
            )
        self.version = 0
        self._runner = runner
        self._page_tokens = page_tokens
        self._stop = frozenset(stop_token_ids)
        self.check: Callable[[Request], None] = functools.partial(
            check_request,
            vocabulary=vocabulary,
            max_sequence=max_sequence_tokens,
            can_decode=stop_texts is not None,
            stop_ids=self._stop,
        )
        self._stop_texts = stop_texts
        self._stretch = stretch
        self._prefill_tokens = prefill_tokens
        self.sleep, self.wake = runner.sleep, runner.wake  # of the cache's memory; only while nothing is left to do
        self._pages = PageAllocator(pages)
        self._tables = BlockTables(self._pages, runner.rows, max_sequence_tokens, page_tokens)
        self._waiting: deque[Waiting] = deque()
        self._rows: dict[int, SampleInFlight] = {}  # in no order
        self._lengths = np.full(runner.rows, -1, np.int64)
        self._generated = np.zeros(runner.rows, np.int64)
        self._limits = np.zeros(runner.rows, np.int64)
        self._ages = itertools.count()
        self._leaving: tuple[list[SampleInFlight | None], Fetch] | None = None  # None: cancelled since
        self.preemptions = 0
        self.decode_steps = 0

    # -- what the engine calls -------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self._waiting or self._rows or self._leaving)

    def submit(self, key: int, request: Request) -> None:
        """Queue a request that :meth:`check` accepts; its samples come back under ``key``."""
        for draft in request.drafts:
            sequence = SampleInFlight.of(key, request, draft)
            self._waiting.append(Waiting(sequence.tokens, deque([sequence])))
        if sequences := deque(SampleInFlight(key, request, index) for index in request.fresh):
            self._waiting.append(Waiting(sequences[0].tokens, sequences))

    def cancel(self, gone: Callable[[int, Request], bool]) -> list[int]:
        """Forget the samples of which ``gone(key, request)``; returns the key of each."""
        keys: list[int] = []

        def stays(sequence: SampleInFlight) -> bool:
            if ends := gone(sequence.key, sequence.request):
                keys.append(sequence.key)
            return not ends

        for waiting in self._waiting:
            waiting.sequences = deque(filter(stays, waiting.sequences))
            if not waiting.sequences:
                self._uncompute(waiting)
        self._waiting = deque(w for w in self._waiting if w.sequences)
        self._end([row for row, sequence in self._rows.items() if not stays(sequence)])
        if self._leaving is not None:
            sequences, fetch = self._leaving
            left = [s if s is not None and stays(s) else None for s in sequences]
            self._leaving = (left, fetch) if any(left) else None
        return keys

    def reset(self) -> None:
        """Forget all requests: the way out after an error."""
        for waiting in self._waiting:
            self._uncompute(waiting)
        self._waiting.clear()
        self._end(list(self._rows))
        self._leaving = None

    def drafts(self, told: Told | None = None) -> list[tuple[int, Draft]]:
        """The samples in flight that have tokens, as they were after the last stretch; those on their way out, not.
        ``told``: less these tokens, and of its keys only."""
        return self._drafts(told)()

    def _drafts(self, told: Told | None) -> Callable[[], list[tuple[int, Draft]]]:
        """Has the device send them; what is returned waits until they are here."""
        waiting = [(s, s.done) for w in self._waiting for s in w.sequences if len(s.done.tokens)]
        rows = {row: s for row, s in self._rows.items() if self._generated[row] and (told is None or s.key in told)}
        fetch = self._runner.fetch(list(rows), [int(self._generated[row]) for row in rows], 0) if rows else None

        def arrived() -> list[tuple[int, Draft]]:
            every = waiting + list(zip(rows.values(), fetch.result() if fetch else (), strict=True))
            asked = ((s, response) for s, response in every if told is None or s.key in told)
            return [(s.key, s.draft(response, told)) for s, response in asked]

        return arrived

    def use_weights(self, version: int) -> None:
        """The model's weights are others now. What is in flight goes on under them; prompts computed ahead do not."""
        self.version = version
        self._runner.use_weights()
        for waiting in self._waiting:
            self._uncompute(waiting)
        for row, sequence in self._rows.items():
            sequence.marks.append((int(self._generated[row]), version))

    def stretch(self, told: Told) -> Iterator[list[tuple[int, Sample | Draft]]]:
        """Admit and decode. While the device is at work, yields the samples that finished in the stretch before, and
        drafts as they were after it; of a stretch of one step both are yielded at its end."""
        waits = self._stretch > 1
        drafts = self._drafts(told) if told and waits else list[tuple[int, Draft]]
        self._admit()
        if not self._rows:
            yield [*self.finished()]
            return
        steps = self._grow()
        self._compact()
        self.decode_steps += steps
        variant = Variant.of([sequence.request.sampling for sequence in self._rows.values()])
        self._runner.run(self._runner.rung(max(self._rows) + 1), steps, variant, self._tables.table)
        yield [*self.finished(), *drafts()]
        if waits:
            draw_ahead(self._waiting)
        self._collect()
        if not waits:
            yield [*self.finished(), *(self.drafts(told) if told else ())]

    def step(self) -> list[tuple[int, Sample]]:
        """The same at once, without drafts."""
        return [(key, one) for some in self.stretch({}) for key, one in some if isinstance(one, Sample)]

    # -- admit -----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start what there is room for, in the order in which it was asked for."""
        starts: list[RowStart] = []
        copies: list[tuple[int, int]] = []
        while self._waiting and len(self._rows) < self._runner.rows:
            if self._waiting[0].pages is None and not self._prefill():
                break
            if not self._start_first(starts, copies):
                break
        if copies:
            sources, targets = np.array(copies, np.int32).T
            self._runner.copy_pages(sources, targets)
        if starts:
            self._runner.start(starts)

    def _prefill(self) -> bool:
        """Compute the prompts at the head of the queue in one packed pass, each once for all its samples.

        On a GPU prompts that cannot start yet are computed along: a pass costs much the same for one as for many.
        """
        batch: list[Waiting] = []
        tokens, rows = 0, self._runner.rows - len(self._rows)
        for waiting in self._waiting:
            if waiting.pages is not None:
                continue
            tokens += waiting.cached
            spare = self._pages.free - self._next_pages()
            if batch and (tokens > self._prefill_tokens or pages_for(waiting.cached, self._page_tokens) > spare):
                break
            if not self._page_tokens and sum(len(w.sequences) for w in batch) >= rows:
                break
            if not batch and not self._make_room(pages_for(waiting.cached, self._page_tokens)):
                return False
            waiting.pages = self._pages.take(pages_for(waiting.cached, self._page_tokens))
            batch.append(waiting)
        prompts = self._runner.prefill([w.tokens for w in batch], [w.pages for w in batch if w.pages is not None])
        for waiting, prompt in zip(batch, prompts, strict=True):
            waiting.prompt = prompt
        return True

    def _make_room(self, pages: int, keep: Waiting | None = None) -> bool:
        """Whether ``pages`` can be taken for something new without taking from what runs."""
        if self._pages.free - self._next_pages() >= pages:
            return True
        if self._rows:
            return False
        for waiting in self._waiting:  # nothing runs: only what was computed ahead can be in the way
            if waiting is not keep:
                self._uncompute(waiting)
        return True

    def _next_pages(self) -> int:
        """Pages that the rows in use may take during a stretch: what is started on top must leave them."""
        return len(self._rows) * (pages_for(self._stretch, self._page_tokens) + 1)

    def _start_first(self, starts: list[RowStart], copies: list[tuple[int, int]]) -> bool:
        """Start samples of the first that waits while there is room; False if not all of them could.

        What the device has to do for it is added to ``starts`` and ``copies`` (a page and the page to copy it to).
        """
        waiting = self._waiting[0]
        assert waiting.pages is not None
        growth = pages_for(self._stretch, self._page_tokens) + 2  # of one stretch, and the copy of a page
        free_rows = (row for row in range(self._runner.rows) if row not in self._rows)
        while waiting.sequences and len(self._rows) < self._runner.rows and self._make_room(growth, keep=waiting):
            row, sequence = next(free_rows), waiting.sequences.popleft()
            # the last one takes over the pages that the others have shared
            pages = self._shared(waiting.pages, waiting.cached, copies) if waiting.sequences else waiting.pages
            self._tables.begin(row, pages)
            starts.append(self._begin(row, sequence, waiting))
        if waiting.sequences:
            return False
        self._waiting.popleft()
        return True

    def _shared(self, pages: PageArray, tokens: int, copies: list[tuple[int, int]]) -> PageArray:
        """Pages for one more sample: the full ones are shared; the last one, which it will write to, is copied."""
        if not len(pages):
            return pages
        full = tokens // self._page_tokens
        self._pages.share(pages[:full])
        if full == len(pages):
            return pages
        own = self._pages.take(1)
        copies.append((int(pages[full]), int(own[0])))
        return np.concatenate([pages[:full], own])

    def _begin(self, row: int, sequence: SampleInFlight, waiting: Waiting) -> RowStart:
        """Enter a sequence under a row's number."""
        done = sequence.done
        sequence.age = next(self._ages) if sequence.age < 0 else sequence.age
        if not sequence.marks or sequence.marks[-1][1] != self.version:
            sequence.marks.append((len(done.tokens), self.version))
        self._rows[row] = sequence
        self._lengths[row], self._generated[row], self._limits[row] = waiting.cached, len(done.tokens), sequence.limit
        last, sampling = int(waiting.tokens[-1]), sequence.request.sampling
        return RowStart(row, last, waiting.cached, sequence.seed, sampling, done, waiting.prompt)

    # -- decode ----------------------------------------------------------------------------------------------------

    def _grow(self) -> int:
        """Give every row the pages of the next stretch; take them from prompts computed ahead and from the youngest.
        Returns the stretch's length: no longer than the last row can go on."""
        if self._stretch == 1 and not self._page_tokens:
            return 1
        while True:
            rows = np.fromiter(self._rows, np.int64)
            steps = np.minimum(self._limits[rows] - self._generated[rows], self._stretch)
            wanted = self._lengths[rows] + steps
            missing = int(self._tables.missing(rows, wanted).sum())
            if missing <= self._pages.free:
                if missing:
                    self._tables.grow(rows, wanted)
                return int(steps.max())
            if not self._drop_computed():
                self._preempt(max(self._rows, key=lambda row: self._rows[row].age))

    def _drop_computed(self) -> bool:
        """Release the pages of the last prompt that was computed ahead, if there is one."""
        for waiting in reversed(self._waiting):
            if waiting.pages is not None and len(waiting.pages):
                self._uncompute(waiting)
                return True
        return False

    def _preempt(self, row: int) -> None:
        """Interrupt a sequence: it waits at the head of the queue with the tokens it has."""
        sequence = self._rows[row]
        count = int(self._generated[row])
        sequence.done = self._runner.fetch([row], [count], sequence.request.sampling.top_logprobs).result()[0]
        self._end([row])
        self._waiting.appendleft(Waiting(sequence.tokens, deque([sequence])))
        self.preemptions += 1

    def _compact(self) -> None:
        """Move the last rows into gaps where that lets the next stretch compute fewer."""
        used = len(self._rows)
        if self._runner.rung(used) >= self._runner.rung(max(self._rows) + 1):
            return
        sources = [row for row in sorted(self._rows) if row >= used]
        targets = [row for row in range(used) if row not in self._rows]
        self._runner.move(sources, targets)
        for source, target in zip(sources, targets, strict=True):
            self._tables.move(source, target)
            self._rows[target] = self._rows.pop(source)
        for of_row in (self._lengths, self._generated, self._limits):
            of_row[targets] = of_row[sources]
        self._lengths[sources] = -1

    # -- collect ---------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Take out the rows that finished during the stretch; their arrays come with the next one."""
        before = self._generated.copy()
        progress = self._runner.progress()
        self._lengths, self._generated = progress.lengths, progress.generated
        done = {row: int(self._generated[row]) for row in self._rows if self._lengths[row] < 0}
        done |= self._stopped_by_text(before)
        if not done:
            return
        rows = list(done)
        top = max(self._rows[row].request.sampling.top_logprobs for row in rows)
        self._leaving = [self._rows[row] for row in rows], self._runner.fetch(rows, list(done.values()), top)
        self._end(rows)

    def _stopped_by_text(self, before: npt.NDArray[np.int64]) -> dict[int, int]:
        """Rows whose response holds one of its stop texts, and how many tokens of it to keep."""
        asked = [row for row, sequence in self._rows.items() if sequence.request.sampling.stop]
        if not asked or self._stop_texts is None:
            return {}
        found: dict[int, int] = {}
        responses = self._runner.fetch(asked, [int(self._generated[row]) for row in asked], 0).result()
        for row, response in zip(asked, responses, strict=True):
            texts = self._rows[row].request.sampling.stop
            end = self._stop_texts.ends_at(response.tokens.tolist(), int(before[row]), texts)
            if end is not None:
                found[row] = end
                self._rows[row].stopped = True
        return found

    def finished(self) -> list[tuple[int, Sample]]:
        """The samples that finished in the stretch before this one."""
        if self._leaving is None:
            return []
        (sequences, fetch), self._leaving = self._leaving, None
        arrived = zip(sequences, fetch.result(), strict=True)
        return [(s.key, s.sample(response, self._stop)) for s, response in arrived if s is not None]

    # -- pages -----------------------------------------------------------------------------------------------------

    def _end(self, rows: Sequence[int]) -> None:
        self._runner.stop(rows)
        for row in rows:
            del self._rows[row]
            self._tables.end(row)
            self._lengths[row] = -1

    def _uncompute(self, waiting: Waiting) -> None:
        """Release the pages of a prompt computed ahead."""
        if waiting.pages is not None:
            self._pages.release(waiting.pages)
            waiting.pages = waiting.prompt = None
