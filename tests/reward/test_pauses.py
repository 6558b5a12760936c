"""How long servers are left alone."""

from __future__ import annotations

import random

import pytest

from dapo.util.http.faults import Pauses, requested_pause


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, 0.0),
        ("", 0.0),
        ("7", 7.0),
        ("1.5", 1.5),
        ("-3", 0.0),
        ("99999", 120.0),
        ("x", 0.0),
        ("nan", 0.0),
        ("inf", 0.0),
        ("\u00b2", 0.0),
        ("\udcff", 0.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("Wed, 21 Oct 2015 07:28:00", 0.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 120.0),
        ("Fri, 31 Dec 9999 23:59:59", 120.0),
        ("Fri, 31 Dec 99999 23:59:59 GMT", 0.0),
        ("Fri, 31 Dec 2100 23:59:59 +99999999999999", 0.0),
    ],
)
def test_a_server_asks_for_a_pause_with_a_number_or_a_date_and_within_bounds(
    header: str | None, seconds: float
) -> None:
    assert requested_pause(header) == seconds


def test_a_date_without_a_zone_is_one_of_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    import time
    from datetime import UTC, datetime, timedelta

    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        soon = datetime.now(UTC) + timedelta(seconds=60)
        assert 50 < requested_pause(soon.strftime("%a, %d %b %Y %H:%M:%S")) <= 60
    finally:
        monkeypatch.undo()
        time.tzset()


def test_pauses_double_and_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    def seven(requested_s: float = 0.0) -> list[float]:
        pauses = Pauses(1.0, 30.0)
        return [pauses.next(requested_s) for _ in range(7)]

    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    assert seven() == [1, 2, 4, 8, 16, 30, 30]
    monkeypatch.setattr(random, "uniform", lambda low, high: low)
    assert seven() == [0.5, 1, 2, 4, 8, 15, 15]
    assert seven(5.0) == [5, 5, 5, 5, 8, 15, 15]  # never shorter than the server wants
