"""Predicted ends of batches: by what has ended lately, and not before there is something to say."""

from __future__ import annotations

import pytest

from weft.batch.forecast import OBSERVED_S, WINDOW_S, EndForecast


def test_a_steady_rate_gives_the_end():
    forecast = EndForecast()
    for second in range(30):
        end = forecast.look(100.0 + second, 2 * second, 200)
        assert (end is None) == (second < OBSERVED_S)
    assert end == pytest.approx(200.0)


def test_only_the_last_minute_counts():
    forecast = EndForecast()
    for second in range(100):
        forecast.look(float(second), 10 * second, 10_000)
    for second in range(100, 200):
        end = forecast.look(float(second), 990 + second - 100, 10_000)
    assert end == pytest.approx(199 + (10_000 - 1089), rel=0.05)


def test_lines_that_run_for_long_need_as_long_again():
    forecast = EndForecast()
    assert forecast.look(0.0, 5, 10) is None
    assert forecast.look(WINDOW_S - 1, 5, 10) is None
    assert forecast.look(WINDOW_S, 5, 10, 2) == WINDOW_S * (1 + 3), (
        "those that run, and two times more"
    )
    assert (forecast.still_s, forecast.stalled) == (WINDOW_S, True)
    assert forecast.look(WINDOW_S + 1, 10, 10) == WINDOW_S + 1
    assert not forecast.stalled
