"""Composites of one AscendC kernel on the twin: the bits of their parts, run one after the other by the twin's own kernels."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "backends/ascend"))

from deepinfer_ascend import twin  # noqa: E402
from deepinfer_ascend.backend import TWIN_INDEX, AscendBackend  # noqa: E402
from deepinfer_ascend.estimate.chips import find_chip  # noqa: E402
from deepinfer_ascend.estimate.replay import replay  # noqa: E402
from deepinfer_hal.card import Case, get_card  # noqa: E402

pytestmark = pytest.mark.skipif(twin.module() is None, reason=str(twin.unavailable_reason()))

FUSED = ("write_kv", "store_draft_kv", "residual_site")


def cases():
    return [pytest.param(op, case, id=case.id) for op in FUSED for case in get_card(op).enumerate_cases()]


def results(op: str, case, call) -> dict[str, torch.Tensor]:
    """What `call` leaves in every output of a case, as bytes."""
    card = get_card(op)
    args = card.generate(case, 11, "cpu", lambda role, stored: AscendBackend().prepare_weight(TWIN_INDEX, role, stored))
    call(args)
    outputs = [arg.name for arg in card.signature if arg.kind in ("out", "inout") and args[arg.name] is not None]
    return {name: args[name].contiguous().view(torch.uint8) for name in outputs}


@pytest.mark.parametrize(("op", "case"), cases())
def test_a_fused_kernel_gives_the_bits_of_its_parts(op, case):
    card = get_card(op)
    parts = SimpleNamespace(**{part: twin.bind(get_card(part)) for part in card.decomposition})
    if op == "store_draft_kv":  # from the parts of its part
        inner = get_card("write_kv")
        unfused = SimpleNamespace(**{part: twin.bind(get_card(part)) for part in inner.decomposition})
        parts = SimpleNamespace(write_kv=lambda *args: inner.reference(*args, parts=unfused))
    fused = results(op, case, lambda args: twin.bind(card)(**args))
    apart = results(op, case, lambda args: card.reference(**args, parts=parts))
    assert fused.keys() == apart.keys() and fused
    for name, found in fused.items():
        assert torch.equal(found, apart[name]), name


@pytest.mark.parametrize(("dtype", "hidden", "streams"), [("bf16", 1001, 4), ("f32", 700, 3), ("bf16", 96, 8), ("f32", 2100, 1)])
def test_rows_that_share_a_reading_of_fn_have_the_bits_of_rows_alone(dtype, hidden, streams):
    """Two vector cores take four rows at once, a whole chip one; widths that fill no block, slices of several sizes."""
    case = Case("residual_site", {"T": 21, "m": streams, "H": hidden, "dtype": dtype, "codes": False, "count": 19})
    kernel, stream = twin.bind(get_card("residual_site")), twin.module().Stream
    few, many = (results("residual_site", case, lambda args, n=n: kernel(**args, stream=stream(cores=n))) for n in (1, 36))
    assert all(torch.equal(found, many[name]) for name, found in few.items())
    expected = results("residual_site", case, lambda args: get_card("residual_site").reference(**args))
    for name in ("out", "pre"):
        kind = torch.bfloat16 if name == "out" and dtype == "bf16" else torch.float32
        found, wanted = few[name].view(kind)[:19].float(), expected[name].view(kind)[:19].float()
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2 if dtype == "bf16" else 1e-4)


def test_a_row_too_wide_for_the_norm_is_refused_with_its_width():
    case = Case("residual_site", {"T": 1, "m": 1, "H": 6176, "dtype": "bf16", "codes": False})
    with pytest.raises(Exception, match="at most 6144 values in local memory, got 6176"):
        results("residual_site", case, lambda args: twin.bind(get_card("residual_site"))(**args))


def test_a_trace_with_a_barrier_of_all_cores_is_replayed_and_more_rows_take_longer():
    cycles = []
    for rows in (2, 32):
        case = Case("residual_site", {"T": rows, "m": 4, "H": 1024, "dtype": "bf16", "codes": False})
        stream = twin.module().Stream(soc="Ascend950DT_9581", cores=2, trace=True)
        results("residual_site", case, lambda args, stream=stream: twin.bind(get_card("residual_site"))(**args, stream=stream))
        cycles.append(replay(twin.take_trace(stream), find_chip("950DT"), 2).cycles)
    assert 0 < cycles[0] < cycles[1] / 2
