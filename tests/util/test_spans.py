"""Where time goes, by a clock that the test turns."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dapo.util.spans import MOST, Spans


@pytest.fixture
def turn(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def later(seconds: float) -> None:
        now[0] += seconds

    return later


def test_what_no_role_takes_is_the_rest_and_nothing_counts_outside(turn: Callable[[float], None]) -> None:
    spans = Spans()
    turn(50)
    with spans.counting():
        turn(1)
        with pytest.raises(ValueError), spans("rollout"):
            turn(2)
            raise ValueError
        with spans("rollout"), spans("reward"):  # side by side
            turn(4)
    turn(50)
    assert spans.total == 7 and spans.seconds == {"rollout": 6, "reward": 4, "rest": 0}


def test_a_count_goes_on_from_that_of_another_process_and_is_cut_at_a_commit(turn: Callable[[float], None]) -> None:
    spans = Spans()
    spans.add({"rollout": 3.0, "rest": 2.0})
    with spans.counting():
        turn(1)
        assert spans.cut()[0] == {"rollout": 3, "rest": 3}
        turn(5)
        with spans("sync"):
            turn(7)
    assert spans.cut()[0] == {"sync": 7, "rest": 5} and spans.total == 0 and not spans.done


def test_the_start_of_a_run_is_what_this_process_took_so_far(turn: Callable[[float], None]) -> None:
    spans = Spans()
    with spans.counting():
        turn(2)
        spans.add({"start": 3.0, "rest": 10.0})
        spans.credit("start")
        turn(4)
        assert spans.seconds == {"start": 5, "rest": 14}


def test_spans_that_overlap_are_one_and_of_many_those_that_are_closest(turn: Callable[[float], None]) -> None:
    spans = Spans()
    with spans("scoring"), spans("scoring"), spans("sampling"):
        turn(1)
    (_, begin, end), *_ = found = spans.cut()[1]
    assert [role for role, *_ in found] == ["sampling", "scoring"] and end - begin == pytest.approx(1)
    for number in range(3 * MOST):
        with spans("update"):
            turn(1)
        turn(1 + (number % 3 == 2))  # three by three
    found = spans.cut()[1]
    assert len(found) == MOST and {round(end - begin) for _, begin, end in found} == {5}


def test_a_span_that_is_still_open_counts_as_its_role(turn: Callable[[float], None]) -> None:
    spans = Spans()
    with spans.counting():
        turn(1)
        with spans("writing"):
            turn(2)
            assert spans.seconds == {"writing": 2.0, "rest": 1.0}
        turn(4)
        assert spans.seconds == {"writing": 2.0, "rest": 5.0}


def test_a_role_that_is_paused_takes_no_time_and_goes_on_unless_it_ends(turn: Callable[[float], None]) -> None:
    spans = Spans()
    with spans.counting():
        with spans("sampling"), spans("scoring"):
            turn(1)
            with spans.pausing("sampling"):
                turn(2)
                assert spans.seconds == {"sampling": 1.0, "scoring": 3.0, "rest": 0.0}
            turn(4)
        ends = spans("sampling")
        ends.__enter__()
        turn(8)
        with spans.pausing("sampling"):
            turn(16)
            ends.__exit__(None, None, None)
        turn(32)
    seconds, found = spans.cut()
    assert seconds["sampling"] == 13.0 and seconds["scoring"] == 7.0
    assert [round(end - begin) for role, begin, end in found if role == "sampling"] == [1, 12]
