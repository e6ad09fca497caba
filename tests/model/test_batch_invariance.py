"""In batch-invariant mode a request's logits have the same bits whatever else is in the step, and wherever it lies."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from deepinfer_cpu.backend import CpuBackend
from deepinfer_cpu.kernels import native_unavailable_reason
from deepinfer_hal.errors import Unsupported

from tests.model.batches import Sequence, run_chunks, run_mixed
from tests.model.nano_models import MODELS, nano_runner, nano_text

NUMERICS = {
    "float32": {"dtype": "float32", "act_quant": "none", "kv_cache_dtype": "float32"},
    "default": {},
}
TOKENS = 300

needs_native = pytest.mark.skipif(native_unavailable_reason() is not None, reason=f"{native_unavailable_reason()}")


@functools.cache
def invariant_runner(name: str, numerics: str):
    return nano_runner(name, batch_invariant=True, **NUMERICS[numerics])


@functools.cache
def alone(name: str, numerics: str, seed: int = 0, tokens: int = TOKENS) -> torch.Tensor:
    """Logits of a text run alone, in one step."""
    return run_chunks(invariant_runner(name, numerics), nano_text(name, tokens, seed), None)


def assert_same_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    different = (found != wanted).any(-1)
    first = int(different.nonzero()[0]) if different.any() else None
    assert first is None, f"{int(different.sum())} of {len(different)} rows differ, the first is {first}"


both = pytest.mark.parametrize(("name", "numerics"), [(name, numerics) for name in MODELS for numerics in NUMERICS])


@needs_native
@both
@pytest.mark.parametrize("chunk", [1, 7, 128, 129])
def test_chunk_boundaries_change_no_bit(name, numerics, chunk):
    assert_same_bits(run_chunks(invariant_runner(name, numerics), nano_text(name), chunk), alone(name, numerics))


@needs_native
@both
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_neighbours_order_slots_and_block_ids_change_no_bit(name, numerics, seed):
    lengths, random = [TOKENS, 131, 40, 1, 260, 7], np.random.default_rng(seed)
    places, slots = random.permutation(48), random.permutation(8)
    sequences = [
        Sequence(nano_text(name, tokens, i), int(slots[i]), tuple(places[8 * i : 8 * i + 8]))
        for i, tokens in enumerate(lengths)
    ]
    found = run_mixed(invariant_runner(name, numerics), sequences, seed)
    for i, (rows, tokens) in enumerate(zip(found, lengths, strict=True)):
        assert_same_bits(rows, alone(name, numerics, i, tokens))


@needs_native
@both
def test_thread_counts_change_no_bit(name, numerics):
    runner, found = invariant_runner(name, numerics), {}
    wanted, before = alone(name, numerics), torch.get_num_threads()
    try:
        for threads in (1, 2):
            runner.loaded.backend.set_threads(threads)
            found[threads] = [run_chunks(runner, nano_text(name), chunk) for chunk in (None, 128)]
    finally:
        runner.loaded.backend.set_threads(before)
    for logits in found[1] + found[2]:
        assert_same_bits(logits, wanted)


@needs_native
@both
def test_drafts_and_their_confidence_do_not_depend_on_neighbours_or_slots(name, numerics):
    runner, ids, anchors = invariant_runner(name, numerics), nano_text(name), [200, 131, 4]
    gold = ids[np.array(anchors) + 1]

    def draft(places: list[tuple[int, int]]) -> list[tuple[torch.Tensor, ...]]:
        """Drafts in one call after the anchors of the given numbers, in the given slots."""
        for which, slot in places:
            for _ in runner.prefill(ids[: anchors[which] + 1], 64, slot=slot, first_block=5 * slot):
                pass
        which, slots = (np.array(column) for column in zip(*places, strict=True))
        arrays = (slots, np.array(anchors)[which], gold[which])
        found = runner.network.draft(*(runner.upload(array.astype(np.int32)) for array in arrays))
        return list(zip(found.draft_logits, found.tokens, found.confidence, strict=True))

    together = draft([(0, 4), (1, 2), (2, 7)])
    for which in range(3):
        (single,) = draft([(which, 0)])
        assert all(torch.equal(one, other) for one, other in zip(single, together[which], strict=True))


@needs_native
@both
def test_the_first_tokens_of_a_draft_are_the_same_when_no_more_are_wanted(name, numerics):
    runner, ids, anchors = invariant_runner(name, numerics), nano_text(name), np.array([200, 131, 4])
    for slot, anchor in enumerate(anchors):
        for _ in runner.prefill(ids[: anchor + 1], 64, slot=slot, first_block=5 * slot):
            pass
    arguments = [runner.upload(array.astype(np.int32)) for array in (np.arange(3), anchors, ids[anchors + 1])]
    whole, first = runner.network.draft(*arguments), runner.network.draft(*arguments, drafts=3)
    assert whole.tokens.shape == (3, 5) and first.tokens.shape == (3, 3) and len(whole.tokens.unique()) > 3
    for one, other in zip(vars(whole).values(), vars(first).values(), strict=True):
        assert torch.equal(one[:, :3], other)


def replace_kernels(monkeypatch, op, **changes):
    """Offers the CPU backend's kernels with changes to one of them; `fn` gets the kernel it replaces."""
    offered = CpuBackend().kernels(0)

    def changed(kernel):
        made = {key: value(kernel) if key == "fn" else value for key, value in changes.items()}
        return dataclasses.replace(kernel, **made) if kernel.op == op else kernel

    monkeypatch.setattr(CpuBackend, "kernels", lambda self, index: [changed(kernel) for kernel in offered])


@needs_native
@pytest.mark.parametrize("op", ["linear", "sparse_attention", "moe_layer", "residual_site", "select_topk"])
def test_a_kernel_that_looks_at_the_number_of_rows_is_noticed(monkeypatch, op):
    """The comparison sees a few last bits of one number of the last row."""

    def batch_dependent(kernel):
        def call(*args):
            kernel.fn(*args)
            out = [a for a in args if isinstance(a, torch.Tensor) and a.dim() >= 2][-1]
            if out.shape[0] % 2 and out.dtype == torch.float32:
                out.view(torch.int32)[-1].view(-1)[0] ^= 16
            elif out.shape[0] % 2 and out.dtype == torch.int32:
                out[-1, 0] = out[-1, 1]

        return call

    replace_kernels(monkeypatch, op, fn=batch_dependent)
    runner = nano_runner("random", batch_invariant=True, **NUMERICS["float32"])
    found = run_chunks(runner, nano_text("random"), 7)
    assert not torch.equal(found, alone("random", "float32"))


@needs_native
@pytest.mark.parametrize("op", ["linear", "sparse_attention", "embedding_gather", "gather_tokens"])
@pytest.mark.parametrize("states", ["no", "unknown"])
def test_the_engine_refuses_to_start_and_names_an_op_whose_kernel_is_not_invariant(monkeypatch, op, states):
    replace_kernels(monkeypatch, op, invariant=states)
    with pytest.raises(Unsupported, match=f"op '{op}' in batch-invariant mode.*batch invariance is '{states}'"):
        nano_runner("random", batch_invariant=True, fallback="forbid")


def test_the_references_alone_are_refused(monkeypatch):
    monkeypatch.setattr(CpuBackend, "kernels", lambda self, index: [])
    with pytest.raises(Unsupported, match="in batch-invariant mode.*reference::.*batch invariance is '(no|unknown)'"):
        nano_runner("random", batch_invariant=True)


def test_without_the_mode_the_references_run_and_their_bits_do_depend_on_the_batch(monkeypatch):
    monkeypatch.setattr(CpuBackend, "kernels", lambda self, index: [])
    runner = nano_runner("random", **NUMERICS["float32"])
    ids = nano_text("random", 33)
    whole, single = run_chunks(runner, ids, None), run_chunks(runner, ids, 1)
    assert not torch.equal(whole, single)
    assert (whole - single).abs().max() <= 2e-3
