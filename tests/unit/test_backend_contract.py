"""What a backend must be, checked when its class is defined; and how backends are found, listed and opened."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import torch
from deepinfer_hal import HAL_VERSION, registry
from deepinfer_hal.backend import Backend, Capabilities, DeviceInfo, MemoryInfo
from deepinfer_hal.errors import BackendContractError, BackendUnavailable
from deepinfer_hal.registry import list_backends, load_backend, open_backend
from deepinfer_hal.weights import CanonicalWeight

from deepinfer.config import EngineConfig
from deepinfer.runner.runner import Runner
from tests.oracle.fixtures import open_case

ROOT = Path(__file__).parents[2]


class Minimal:
    """The three required functions, to be mixed into a Backend."""

    def probe(self):
        return [DeviceInfo(0, "toy")]

    def device(self, index):
        return torch.device("cpu")

    def capabilities(self, index):
        return Capabilities()


class ToyBackend(Minimal, Backend):
    name = "toy"


class RaisingBackend(Minimal, Backend):
    name = "raising"

    def probe(self):
        raise OSError("libvendor.so.1: cannot open shared object file")


class EmptyBackend(Minimal, Backend):
    name = "empty"

    def probe(self):
        return []


class UnstartableBackend(Minimal, Backend):
    name = "unstartable"

    def __init__(self):
        raise RuntimeError("driver too old")


NOT_A_BACKEND = object()


def mistakes_of(bases=(Minimal, Backend), **members) -> tuple[str, ...]:
    """What defining a class with these members complains of."""
    with pytest.raises(BackendContractError) as caught:
        type("Wrong", bases, {"name": "wrong", **members})
    return caught.value.mistakes


def offer(monkeypatch, **classes: str):
    """Makes these the only backends: name -> "module:attribute"."""
    entries = {name: EntryPoint(name, value, registry.GROUP) for name, value in classes.items()}
    monkeypatch.setattr(registry, "_entries", lambda: entries)


def here(attribute: str) -> str:
    return f"{__name__}:{attribute}"


class TestDefiningAClass:
    def test_three_mistakes_come_in_one_error_that_lists_them_all(self):
        with pytest.raises(BackendContractError) as caught:

            class Wrong(Backend):
                name = "wrong"

                def probe(self):
                    return []

                def device(self, idx):
                    return torch.device("cpu")

                def krenels(self, index):
                    return ()

        error = caught.value
        assert len(error.mistakes) == 3
        assert all(one in str(error) for one in error.mistakes)
        assert "Wrong" in str(error)
        assert any("capabilities() is required" in one for one in error.mistakes)
        assert any("device(self, idx) must be device(self, index)" in one for one in error.mistakes)
        assert any("'krenels'" in one and "did you mean 'kernels'" in one for one in error.mistakes)

    @pytest.mark.parametrize("missing", ["probe", "device", "capabilities"])
    def test_each_required_function_is_asked_for(self, missing):
        members = {name: value for name, value in vars(Minimal).items() if name in ("probe", "device", "capabilities")}
        del members[missing]
        (mistake,) = mistakes_of((Backend,), **members)
        assert mistake == f"{missing}() is required and missing"

    def test_an_unknown_public_name_is_refused_and_a_private_one_is_not(self):
        (mistake,) = mistakes_of(helper=lambda self: None)
        assert "unknown public name 'helper'" in mistake
        type("Right", (Minimal, Backend), {"name": "right", "_helper": lambda self: None})

    @pytest.mark.parametrize(
        "override",
        [
            lambda self: (),
            lambda self, device: (),
            lambda self, *, index: (),
            lambda self, *index: (),
            lambda self, index, more=None: (),
        ],
    )
    def test_every_other_signature_is_refused(self, override):
        (mistake,) = mistakes_of(kernels=override)
        assert "must be kernels(self, index)" in mistake

    @pytest.mark.parametrize(
        "value", [None, 3, staticmethod(lambda index: ()), classmethod(lambda cls, index: ()), property(lambda self: ())]
    )
    def test_a_function_can_only_be_replaced_by_a_method(self, value):
        (mistake,) = mistakes_of(kernels=value)
        assert "kernels must be a method kernels(self, index)" in mistake

    def test_what_is_mixed_in_is_held_to_the_contract_too(self):
        class Mixin(Minimal):
            def warm_up(self):
                pass

        (mistake,) = mistakes_of((Mixin, Backend))
        assert "'warm_up'" in mistake

    @pytest.mark.parametrize("name", ["", None, 7])
    def test_a_backend_has_a_name(self, name):
        (mistake,) = mistakes_of(name=name)
        assert "`name`" in mistake

    @pytest.mark.parametrize(
        "bounds",
        [
            {"hal_min": (HAL_VERSION[0], HAL_VERSION[1] + 1), "hal_max": (HAL_VERSION[0] + 1, 0)},
            {"hal_min": (0, 1), "hal_max": (0, 9)},
        ],
    )
    def test_a_backend_for_another_hal_version_is_refused_with_both_versions(self, bounds):
        (mistake,) = mistakes_of(**bounds)
        low, high, this = (".".join(map(str, one)) for one in (bounds["hal_min"], bounds["hal_max"], HAL_VERSION))
        assert mistake == f"written for HAL {low} to {high}, this is {this}"

    @pytest.mark.parametrize("value", ["1.0", 1, (1,), ("1", "0")])
    def test_a_version_bound_of_another_form_is_a_mistake_and_no_crash(self, value):
        (mistake,) = mistakes_of(hal_min=value)
        assert "`hal_min` must be (major, minor)" in mistake


class TestDefaults:
    backend = ToyBackend()

    def test_everything_optional_works_on_a_synchronous_device(self):
        backend = self.backend
        assert backend.kernels(0) == ()
        assert backend.communicator(0) is backend.graphs(0) is backend.ipc(0) is None
        assert backend.stream(0) is backend.event(0) is backend.mark(0) is None
        assert backend.memory_info(0) == MemoryInfo(0, 0)
        assert backend.profiles() == {} and backend.describe_build() == {}
        backend.synchronize(0)
        with backend.sync_guard(0), backend.range("step"):
            pass
        clock = backend.timer(0)
        assert clock() <= clock()

    def test_copies_arrive(self):
        source, target = torch.arange(4), torch.zeros(4, dtype=torch.int64)
        self.backend.copy_async(target, source)
        assert torch.equal(target, source)
        assert self.backend.pinned_empty((2, 3), torch.int32).shape == (2, 3)

    def test_memory_errors_are_told_from_others(self):
        assert self.backend.classify_error(MemoryError()) == "out_of_memory"
        assert self.backend.classify_error(torch.OutOfMemoryError()) == "out_of_memory"
        assert self.backend.classify_error(ValueError()) == "unknown"

    def test_weights_keep_the_bytes_of_the_checkpoint(self):
        weight = CanonicalWeight("bf16", torch.ones(3, 32, dtype=torch.bfloat16))
        handle = self.backend.prepare_weight(0, "wq_b", weight)
        assert torch.equal(handle.canonical().values, weight.values)
        assert self.backend.prepared_nbytes("wq_b", (3, 32), "bf16") == handle.nbytes

    def test_on_an_accelerator_memory_streams_and_waiting_come_from_torch(self, monkeypatch):
        calls = []
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (3, 7))
        monkeypatch.setattr(torch.accelerator, "synchronize", calls.append)
        assert self.backend.memory_info(0) == MemoryInfo(free_bytes=3, total_bytes=7)
        self.backend.synchronize(0)
        self.backend.timer(0)()
        assert calls == [torch.device("cpu")] * 2


class TestFinding:
    def test_a_minimal_backend_runs_a_model_on_the_references(self, monkeypatch):
        offer(monkeypatch, toy=here("ToyBackend"))
        case = open_case("tiny")
        config = EngineConfig.create(
            model=str(case.folder), backend="toy", dtype="float32", act_quant="none", kv_cache_dtype="float32",
            max_model_len=256, max_num_seqs=1, max_num_batched_tokens=64,
        )  # fmt: skip
        runner = Runner.from_config(config)
        ids = case.expected["input_ids"].numpy()[:48]
        expected = torch.log_softmax(case.expected["noquant.logits"][:48].float(), -1).numpy()
        assert np.abs(runner.score(ids) - expected).max() <= 1e-4
        served = {choice.provider for choice in runner.loaded.dispatcher.table()}
        assert served == {"reference"}
        assert runner.loaded.dispatcher.fallbacks["sparse_attention"] == 1

    def test_a_broken_backend_is_listed_with_its_error_and_hides_no_other(self, monkeypatch):
        offer(
            monkeypatch, toy=here("ToyBackend"), absent="no_such_vendor.backend:Backend", raising=here("RaisingBackend"),
            object=here("NOT_A_BACKEND"), unstartable=here("UnstartableBackend"), empty=here("EmptyBackend"),
        )  # fmt: skip
        found = {one.name: one for one in list_backends()}
        assert found["toy"].devices == (DeviceInfo(0, "toy"),) and not found["toy"].error
        assert "no_such_vendor" in found["absent"].error
        assert "libvendor.so.1" in found["raising"].error
        assert "is no Backend class" in found["object"].error
        assert "driver too old" in found["unstartable"].error
        assert found["empty"].backend is not None and found["empty"].devices == ()
        assert open_backend("auto")[0].name == "toy"

    def test_the_cause_of_a_backend_that_cannot_be_used_is_kept(self, monkeypatch):
        offer(monkeypatch, absent="no_such_vendor:B", unstartable=here("UnstartableBackend"), raising=here("RaisingBackend"))
        for name, cause, call in (
            ("absent", ModuleNotFoundError, load_backend),
            ("unstartable", RuntimeError, load_backend),
            ("raising", OSError, open_backend),
        ):
            with pytest.raises(BackendUnavailable, match=name) as caught:
                call(name)
            assert isinstance(caught.value.__cause__, cause)

    def test_an_error_without_words_is_named_by_its_type(self, monkeypatch):
        class Wordless(RaisingBackend):
            def probe(self):
                raise KeyError

        monkeypatch.setitem(globals(), "Wordless", Wordless)
        offer(monkeypatch, raising=here("Wordless"))
        with pytest.raises(BackendUnavailable, match="KeyError"):
            open_backend("auto")

    def test_a_backend_that_calls_itself_otherwise_is_refused(self, monkeypatch):
        offer(monkeypatch, other=here("ToyBackend"))
        with pytest.raises(BackendUnavailable, match="'other'.*'toy'"):
            load_backend("other")

    def test_an_unknown_name_is_answered_with_those_there_are(self, monkeypatch):
        offer(monkeypatch, toy=here("ToyBackend"))
        with pytest.raises(BackendUnavailable, match="installed: toy"):
            load_backend("tpu")

    @pytest.mark.parametrize("spec", ["toy:", "toy:x", "toy:-1", "toy:1", "toy:\u00b2", "empty", "empty:0"])
    def test_a_device_that_is_not_there_is_refused(self, monkeypatch, spec):
        offer(monkeypatch, toy=here("ToyBackend"), empty=here("EmptyBackend"))
        with pytest.raises(BackendUnavailable):
            open_backend(spec)

    def test_auto_with_no_device_gives_every_reason(self, monkeypatch):
        offer(monkeypatch, empty=here("EmptyBackend"), raising=here("RaisingBackend"))
        with pytest.raises(BackendUnavailable, match=r"empty: no device.*raising: .*libvendor"):
            open_backend("auto")

    def test_auto_prefers_an_accelerator_to_the_processor(self, monkeypatch):
        offer(monkeypatch, cpu="deepinfer_cpu.backend:CpuBackend", toy=here("ToyBackend"))
        assert registry.backend_names() == ["toy", "cpu"]
        assert open_backend("auto")[0].name == "toy"

    def test_discovery_imports_no_backend_and_no_vendor_library(self):
        code = (
            "import sys; from deepinfer_hal.registry import backend_names; names = backend_names(); assert 'cpu' in names; "
            "loaded = [m for m in sys.modules if m.split('.')[0] in ('deepinfer_cpu', 'triton', 'torch_npu', 'acl')]; "
            "assert not loaded, loaded"
        )
        paths = [str(ROOT), str(ROOT / "hal"), str(ROOT / "backends" / "cpu")]
        subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}; {code}"], check=True, cwd="/")
