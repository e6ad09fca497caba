"""What a rank's slice takes is known before it is made, refused where it does not fit, and where the time went is told."""

from __future__ import annotations

import pytest
from deepinfer_cpu.backend import CpuBackend
from deepinfer_hal.backend import Backend, MemoryInfo

from deepinfer.bench import phases as phasing
from deepinfer.bench import rank_slice, slice_memory
from deepinfer.bench.phases import Phases, describe
from deepinfer.bench.slice_config import make_slice
from deepinfer.bench.slice_memory import check_memory, plan_memory
from deepinfer.bench.slice_model import SliceModel
from deepinfer.bench.slice_steps import BoundNetwork
from deepinfer.bench.slice_workload import Workload
from deepinfer.bench.v41 import released_config
from deepinfer.cli.main import main
from deepinfer.errors import CapacityError, ConfigError
from deepinfer.model.load import tracked_weight_bytes
from deepinfer.model_config import ModelConfig
from deepinfer.model_path import resolve_model

RELEASED = ModelConfig.from_dict(released_config())
NANO = ModelConfig.from_folder(resolve_model("nano"))
LOAD = Workload((64,), (64,), 131_072, (4096, 65_536), ops_at=(64,), gap_steps=8)


class Small(CpuBackend):
    """A device with so many free bytes, which keeps weights as the checkpoint has them."""

    prepared_nbytes = Backend.prepared_nbytes

    def __init__(self, free: int) -> None:
        self.free = free

    def memory_info(self, index: int) -> MemoryInfo:
        return MemoryInfo(self.free, self.free)


class TestThePlan:
    def test_is_what_is_allocated(self):
        backend, cut, load = CpuBackend(), make_slice(NANO, 6, 2), Workload((3,), (3,), 300, (), ops_at=())
        plan = plan_memory(cut, load, backend, 0)
        model = SliceModel(backend, 0, cut, sequences=3, context=300)
        constants = tracked_weight_bytes(model.weights) - plan.weights  # of the Engram hash, which no plan counts
        assert 0 <= constants < 1000
        history = 3 * 128 * 4  # a slice's history has a block beyond the context
        assert plan.caches == sum(model.state.tracked_bytes().values()) - history
        network = BoundNetwork(model, slice_memory.decode_rows(model.text, load)).network
        assert sum(network.workspace_bytes.values()) <= plan.steps < 3 * sum(network.workspace_bytes.values())

    def test_the_largest_network_counts(self):
        cut, backend = make_slice(RELEASED, 6, 64), Small(0)
        decode = plan_memory(cut, Workload((64,), (64,), 131_072, (), ()), backend, 0)
        prefill = plan_memory(cut, LOAD, backend, 0)
        assert prefill.steps > 20 * decode.steps and prefill.weights == decode.weights

    def test_counts_copies_of_the_largest_weight_where_they_are_more_than_what_comes_later(self):
        plan = plan_memory(make_slice(RELEASED, 2, 1), Workload((1,), (), 128, (), ()), Small(0), 0)
        assert plan.loading > plan.caches + plan.steps and plan.total == plan.weights + plan.loading + plan.spare


class TestWhatDoesNotFit:
    def test_is_refused_with_what_would(self):
        backend, cut = Small(80 << 30), make_slice(RELEASED, 6, 1)
        with pytest.raises(CapacityError, match="EP1 with 6 layers needs .* has 80.00 GiB free; lower --layers to") as told:
            check_memory(cut, LOAD, backend, 0)
        assert told.value.needed_bytes > told.value.available_bytes == 80 << 30
        words = str(told.value).rpartition("lower ")[2].replace(",", "").split()
        advised = {words[place - 2]: int(words[place]) for place in range(2, len(words)) if words[place - 1] == "to"}
        fits = check_memory(make_slice(RELEASED, advised["--layers"], 1), LOAD, backend, 0)
        assert fits.total <= 80 << 30
        assert plan_memory(make_slice(RELEASED, advised["--layers"] + 1, 1), LOAD, backend, 0).total > 80 << 30

    def test_is_refused_before_anything_is_measured(self, monkeypatch):
        monkeypatch.setattr(rank_slice, "measure_ceilings", lambda *given: pytest.fail("measured"))
        with pytest.raises(CapacityError):
            rank_slice.measure(Small(1 << 20), 0, make_slice(NANO, 2, 2), Workload((1,), (1,), 128, (), ()))

    def test_a_device_that_tells_nothing_is_not_checked(self):
        assert check_memory(make_slice(RELEASED, 6, 1), LOAD, Small(0), 0).total > 80 << 30

    def test_nothing_may_help_alone(self):
        with pytest.raises(CapacityError, match="no single one of --layers"):
            check_memory(make_slice(RELEASED, 6, 64), LOAD, Small(1 << 20), 0)


def test_a_verify_size_must_be_one_of_the_requests():
    with pytest.raises(ConfigError, match="verify: 8 is none of --requests 64, 1"):
        Workload((64, 1), (8,), 128, (), ()).check()


def test_the_command_prints_the_plan_and_measures_nothing(monkeypatch, capsys):
    monkeypatch.setattr(rank_slice, "measure", lambda *given: pytest.fail("measured"))
    sizes = ["--requests", "2", "--context", "256", "--prefill", "512", "--memory"]
    assert main(["bench", "rank-slice", "--backend", "cpu", "--model", "nano", "--ranks", "2,1", *sizes]) == 0
    shown = capsys.readouterr().out
    assert "EP2, 6 layers: " in shown and "EP1, 6 layers: " in shown and "the largest step" in shown


class TestPhases:
    def test_every_second_counts_once(self, monkeypatch):
        clock = iter([0.0, 1.0, 3.0, 7.0, 8.0])
        monkeypatch.setattr(phasing.time, "perf_counter", lambda: next(clock))
        phases = Phases()
        with phases("outer"):  # from 0
            with phases("inner"):  # from 1 to 3
                pass
        # outer ends at 7
        assert phases.take() == {"outer": 1.0 + 4.0, "inner": 2.0} and phases.take() == {}

    def test_work_that_was_enqueued_counts_as_the_phases_own(self):
        done = []
        with Phases(lambda: done.append("waited"))("one"):
            assert not done
        assert done == ["waited"]

    def test_are_told_longest_first(self):
        assert describe({"a": 0.5, "b": 1.25}) == "b 1.25 s, a 0.50 s"
