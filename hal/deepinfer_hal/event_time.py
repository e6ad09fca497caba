"""A clock and a bounded wait over a vendor's events, so that each backend brings the events alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

AWAKE_SECONDS = 2e-4
"""So long a wait looks without a pause: even a short sleep takes longer than most of what is waited for."""


class NotDone(RuntimeError):
    """A device was not done within the time given to it; it may be yet."""


def event_clock(mark: Callable[[], Any]) -> Callable[[], float]:
    """Clock in seconds by a device's own events, from when the clock was made; reading it waits for the device.

    mark: makes an event that can tell times and records it on the current stream. Spans between readings are added up:
    elapsed_time gives milliseconds as a float32, too coarse over a long span.
    """
    last, seconds = mark(), 0.0

    def clock() -> float:
        nonlocal last, seconds
        now = mark()
        now.synchronize()
        seconds += last.elapsed_time(now) / 1e3
        last = now
        return seconds

    return clock


def wait_bounded(done: Any, seconds: float, device: str) -> None:
    """Waits until the recorded event `done` has happened, polling, so that a dead device or rank is noticed. NotDone, which
    names `device`, after `seconds`."""
    start, pause = time.monotonic(), 1e-5
    while not done.query():
        waited = time.monotonic() - start
        if waited > seconds:
            raise NotDone(f"{device} was not done after {seconds:g} s")
        if waited > AWAKE_SECONDS:
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
