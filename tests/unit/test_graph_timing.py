"""The benchmarks' clock over a stand-in for torch.cuda: what is captured, what is discarded, what is divided by what."""

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path[:0] = [str(Path(__file__).parents[2] / "tools/cuda")]

import graph_timing  # noqa: E402


class StandIn:
    """A device whose time passes in replays alone; `spans` are the milliseconds of each, in order."""

    def __init__(self, spans):
        self.now, self.spans, self.said = 0.0, list(spans), []

    def replay(self):
        self.now += self.spans.pop(0)

    def mark(self, enable_timing):
        assert enable_timing
        event = SimpleNamespace(at=None, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda end: end.at - event.at
        return event

    @contextlib.contextmanager
    def graph(self, graph):
        self.said.append("begin")
        yield
        self.said.append("end")


@pytest.fixture
def device(monkeypatch):
    def make(spans):
        made = StandIn(spans)
        stream = SimpleNamespace(wait_stream=lambda other: None)
        cuda = SimpleNamespace(
            Stream=lambda: stream, current_stream=lambda: stream, stream=lambda one: contextlib.nullcontext(), Event=made.mark,
            CUDAGraph=lambda: made, graph=made.graph,
        )  # fmt: skip
        monkeypatch.setattr(graph_timing, "torch", SimpleNamespace(cuda=cuda))
        return made

    return make


def test_the_first_samples_are_discarded_and_the_median_of_the_others_is_that_of_a_replay(device):
    made = device([9, 9, 9, 9, 9, 9, 1, 1, 2, 4, 5, 5])  # three samples of two replays discarded, then 2, 6 and 10 ms
    assert graph_timing.microseconds(lambda: made.said.append("run"), samples=3) == 3000
    assert made.said == ["run", "run", "begin", "run", "end"] and made.spans == []


def test_calls_share_one_graph_in_order_and_its_time(device):
    made = device([8, 6, 2, 4])
    calls = [lambda one=one: made.said.append(one) for one in "ab"]
    assert graph_timing.microseconds_of_a_call(calls, samples=3, discarded=1) == 2000
    assert made.said == [*"abab", "begin", *"ab", "end"] and made.spans == []


def test_runs_in_turn_share_what_the_clock_does_meanwhile(device):
    made = device([90, 70, 4, 2, 8, 6, 6, 4])  # a round discarded, then 4, 8 and 6 ms of one and 2, 6 and 4 of the other
    assert graph_timing.microseconds_in_turn([lambda: None, lambda: None], samples=3, discarded=1) == [6000, 4000]
    assert made.spans == [] and made.said == ["begin", "end"] * 2
