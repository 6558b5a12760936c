"""``dapo replay``: a rollout step made again from what was stored of it, and what differs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dapo.commands.shared.options import AsJson, Run
from dapo.commands.shared.output import columns, print_json, print_lines, status_line, terminal_width
from dapo.errors import ConfigError

if TYPE_CHECKING:
    from dapo.commands.replay.recompute import Difference
    from dapo.commands.replay.replay import Replay

_SHOWN = 4  # so many differences of one cause are printed one by one; --json has all of them


def replay(
    run: Run,
    step: Annotated[
        int | None, typer.Option(metavar="K", help="Rollout step, from 1. By default the last one with samples.")
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(metavar="DRAW:INDEX", help="Show the tokens of this sample, numbered as by dapo inspect."),
    ] = None,
    rewards: Annotated[
        bool, typer.Option("--rewards/--no-rewards", help="Score the samples again, which may call a judge.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Make a rollout step of RUN again from what was stored of it, and compare with what was recorded.

    Exit code 0 if nothing differs, 1 if something does. What could not be made again is named and does not count.
    """
    wanted = _sample(sample)
    from dapo.observe.run_view import RunView
    from dapo.util.files import plain

    there = RunView.read(run).steps_with_samples  # before torch is loaded: the folder may be a wrong one
    with status_line(as_json, "loading") as progress:
        from dapo.commands.replay.replay import replay as make_again

        last = there[-1] if there else 1
        found = make_again(run, last if step is None else step, wanted, rewards, progress)
    if as_json:
        print_json(plain(found.as_json()))
    else:
        if found.sample is not None:
            _print_tokens(found.sample)
            print()
        print_lines(report(found))
        print(verdict(found))
    if found.differences:
        raise typer.Exit(1)


def _sample(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,12}):(\d{1,9})", text)
    if found is None:
        raise ConfigError(
            f"--sample {text}: expected DRAW:INDEX, such as 12:0; dapo inspect RUN --samples shows both of each sample"
        )
    return int(found[1]), int(found[2])


def report(found: Replay) -> Iterator[str]:
    from dapo.util.terminal import visible

    yield from (f"could not be made again: {visible(text)}" for text in found.missing)
    batch = found.batch
    dropped = "".join(f", {count} {status}" for status, count in batch["dropped"].items())
    yield (
        f"step {found.step}: {batch['groups']} groups, {batch['samples']} samples; {batch['groups_trained']} groups "
        f"trained on{dropped}; {batch['loss_tokens']:,} of {batch['tokens_trained']:,} tokens in the loss"
    )
    if found.rewards is not None:
        yield f"rewards: {found.rewards['samples']} scored again, {found.rewards['changed']} differ"
    punished = [one for one in found.samples if one["overlong_penalty"]]
    outside = sum(not one["in_loss"] for one in found.samples)
    share = f"{len(punished)} of {len(found.samples)}"
    yield f"shaping: {share} samples with an overlong penalty, {outside} not in the loss"
    if found.start is not None:
        again = f", then the updates of {len(found.rerun)} steps made again" if found.rerun else ""
        yield f"weights: from {found.start}{again}"
    if _made_again(found):  # otherwise there is nothing to show of them but what was planned
        yield ""
        differing = {one.update for one in found.differences if one.what.startswith(f"step {found.step}: ")}
        yield from columns(_HEADER, [_row(one, differing) for one in found.updates])
    yield from (f"note: {visible(text)}" for text in found.notes)
    if found.differences:
        yield ""
        yield from _summary(found.differences)


_HEADER = ("update", "groups", "loss tokens", "token weight", "loss", "clip low", "clip high", "grad norm", "recorded")


def _row(update: Mapping[str, Any], differing: set[int | None]) -> list[str]:
    made, recorded = update.get("recomputed") or {}, update.get("recorded")
    low, high = update["token_weight"]
    weight = f"{low:.4g}" if low == high else f"{low:.3g} to {high:.3g}"
    numbers = [_number(made.get(name)) for name in ("loss", "clip_low", "clip_high", "grad_norm")]
    same = "-" if not (made and recorded) else "differs" if update["update"] in differing else "same"
    tokens = made.get("loss_tokens", update["loss_tokens"])
    return [str(update["update"]), str(len(update["draws"])), f"{tokens:,}", weight, *numbers, same]


def _number(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, int | float) else "-"


def _summary(differences: Sequence[Difference]) -> Iterator[str]:
    """The first few of each cause and how many there are. What differs after the first update that does is its
    consequence: the weights are others then."""
    first = next((one.update for one in differences if one.update is not None), None)
    causes: dict[str, list[Difference]] = {}
    for one in differences:
        causes.setdefault(_cause(one, first), []).append(one)
    for cause, members in causes.items():
        shown = 0 if cause == _LATER else _SHOWN
        yield from (difference(one) for one in members[:shown])
        if cause == _LATER:
            yield f"and {len(members)} numbers {cause} update {first}, whose weights follow from it (--json shows them)"
        elif len(members) > shown:
            yield f"and {len(members) - shown} more {cause} (--json shows them)"


_LATER = "of updates after"


def _cause(one: Difference, first: int | None) -> str:
    if one.update is not None:
        return f"of update {first}" if one.update == first else _LATER
    return f"that differ so: {one.what}"


def difference(one: Difference) -> str:
    from dapo.util.terminal import visible

    place = f"sample {one.draw}:{one.index}: " if one.index is not None else ""
    if one.index is None and one.draw is not None:
        place = f"draw {one.draw}: "
    what = one.what if one.update is None else one.what.replace(": ", f", update {one.update}: ", 1)
    values = "" if one.recorded is None and one.recomputed is None else f": {_changed(one.recorded, one.recomputed)}"
    return visible(f"differs: {place}{what}{values}")


def _changed(was: Any, now: Any) -> str:
    if isinstance(was, Mapping) and isinstance(now, Mapping):  # two rewards
        return "; ".join(f"{key} {was[key]!r}, now {now.get(key)!r}" for key in was if was[key] != now.get(key))
    return f"recorded {was!r}, now {now!r}"


def verdict(found: Replay) -> str:
    if found.differences:
        return f"{len(found.differences)} differences"
    compared = "to the bit" if not found.tolerance else f"losses and gradients to {found.tolerance:g}"
    if not found.missing:
        return f"nothing differs ({compared})"
    missing = ", ".join(dict.fromkeys(text.partition(":")[0] for text in found.missing))
    if not _made_again(found):
        return f"of what needs no weights nothing differs; not made again: {missing}"
    return f"nothing differs in what was made again ({compared}); not made again: {missing}"


def _made_again(found: Replay) -> bool:
    return any(update.get("recomputed") for update in found.updates)


def _print_tokens(sample: Mapping[str, Any]) -> None:
    from dapo.util.terminal import visible

    where = "no update" if sample["update"] is None else f"update {sample['update']}"
    print(f"sample {sample['draw']}:{sample['index']} of row {sample['row']}, {sample['status']}, in {where}")
    header = ("place", "token", "id", "p engine", "p trainer", "ratio", "advantage", "clip", "loss", "entropy")
    rows = []
    for place, one in enumerate(sample["tokens"]):
        clip = one.get("clip") or ("not in the loss" if one.get("in_loss") is False else "")
        ratio, advantage, *others = (_number(one.get(name)) for name in ("ratio", "advantage", "loss", "entropy"))
        logprobs = (one.get(f"{whose}_logprob") for whose in ("engine", "trainer"))
        chances = ("-" if logprob is None else f"{math.exp(logprob):.4f}" for logprob in logprobs)
        text = visible(one["text"]).replace("\n", "\\n")
        rows.append([str(place), text, str(one["token"]), *chances, ratio, advantage, clip, *others])
    print_lines(columns(header, rows, terminal_width()))
