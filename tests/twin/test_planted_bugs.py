"""Every planted mistake is reported, and the same kernels without it are not. The schedule makes no difference."""

from __future__ import annotations

import probes
import pytest
import torch
from deepinfer_hal.errors import BackendError

pytestmark = pytest.mark.skipif(probes.missing() is not None, reason=str(probes.missing()))

# Abbreviations in the messages below.
WORDS = {
    "WR: ": r"race \(write, then read\): ",
    "RW: ": r"race \(read, then write\): ",
    "WW: ": r"race \(write, then write\): ",
    "GM: ": "race in global memory: ",
    "UNWRITTEN": "that nothing has written",
    "SOURCE": r"kernels_ascendc/twin/probes/probe_bugs\.asc:\d+",
}
# Number: what is wrong, how many blocks run, what the report says.
BUGS = {
    1: ("flag MTE2 to V left out", 1, r"WR: DataCopy at \S*SOURCE.*Muls at \S*SOURCE.*SetFlag/WaitFlag<MTE2_V>"),
    2: ("flag V to MTE3 left out", 1, r"WR: Muls at .*SetFlag/WaitFlag<V_MTE3>"),
    3: ("result overwritten while it is copied out", 1, r"RW: DataCopy at .*Muls at .*<MTE3_V>"),
    4: ("input overwritten while it is read", 1, r"RW: Muls at .*DataCopy at .*<V_MTE2>"),
    5: ("two copies into one place", 1, r"WW: DataCopy .*PipeBarrier<PIPE_MTE2>"),
    6: (
        "destination overlaps its source by all but one block",
        1,
        r"Muls at .*overlaps the first source .* without starting at the same",
    ),
    7: ("scalar read of a vector result without a flag", 1, r"WR: Muls at .*GetValue at .*<V_S>"),
    8: ("scalar write over a vector result without a flag", 1, r"WW: Muls at .*SetValue at .*<V_S>"),
    9: ("two copies out to overlapping places", 1, r"GM: DataCopy at .*writes.*DataCopy at .*writes"),
    10: ("nothing was loaded", 1, r"Add at .*reads bytes of UB .*UNWRITTEN"),
    11: ("a short copy", 1, r"Muls at .*reads bytes of UB at 512 .*UNWRITTEN"),
    12: ("tail of a block used without padding", 1, r"Muls at .*reads bytes of UB at 20 .*UNWRITTEN"),
    13: ("stale half of a double buffer", 1, r"Muls at .*UNWRITTEN"),
    14: ("more UB than there is", 1, r"InitBuffer at .*UB has 253952 bytes, 0 are taken and 307200 more asked for"),
    15: ("past the end of UB", 1, r"Duplicate at .*reaches bytes \[253696, 254208\) of UB, which has 253952"),
    16: ("past the end of a GlobalTensor", 1, r"DataCopy at .*reaches 256 bytes of a GlobalTensor of 8 elements"),
    17: ("outside of the call's tensors", 1, r"DataCopy at .*outside of every tensor of the call"),
    18: (
        "operand off the 32-byte grid",
        1,
        r"Duplicate at .*starts at byte 4 of UB, and must start at a multiple of 32",
    ),
    19: ("copy of no whole block", 1, r"DataCopy at .*moves whole 32-byte blocks; 30 elements"),
    20: ("wait without set", 1, r"deadlock: WaitFlag<MTE2_V>\(0\) at .*no SetFlag before it"),
    21: ("set twice", 1, r"SetFlag<MTE2_V>\(0\) at .*the flag is set already"),
    22: ("set and never waited for", 1, r"the flag set at .*is never waited for"),
    23: ("wrong event id", 1, r"deadlock: WaitFlag<MTE2_V>\(1\)"),
    24: ("queue without a free buffer", 1, r"deadlock: AllocTensor at .*waits for one of 1 buffers"),
    25: ("queue without a filled buffer", 1, r"deadlock: DeQue at .*none is in the queue"),
    26: ("no such event id", 1, r"event ids are 0 to 7, got 8"),
    27: ("a foreign tensor into a queue", 1, r"EnQue at .*was not given out by this queue"),
    28: ("load behind a store in one vector function", 1, r"WR: StoreAlign at .*LoadAlign at"),
    29: (
        "register instruction outside of a vector function",
        1,
        r"register instructions belong in a function that asc_vf_call",
    ),
    30: ("all cores write one place", 4, r"GM: DataCopy at .*vector core \d.*writes.*vector core \d.*writes"),
    31: ("a neighbour's result without a barrier", 4, r"GM: .*(reads|writes).*(reads|writes)"),
    33: ("one core does not come to SyncAll", 4, r"deadlock:.*vector core 0 waits at .*SyncAll;.*vector core 3 waits"),
    34: ("float atomics in any order", 4, r"add floats atomically .* in an order left to chance"),
    35: (
        "a flag between cores that one core ignores",
        4,
        r"vector core 0: 1 CrossCoreSetFlag of id 4 were never waited for",
    ),
    40: ("a filled buffer that nobody takes", 1, r"InitBuffer at .* ends with a tensor that no DeQue took after EnQue at"),
    41: ("a buffer that is not given back", 1, r"InitBuffer at .* ends with a tensor that no FreeTensor gave back"),
    42: ("one buffer too many", 1, r"InitBuffer at .*: 3 buffers for a queue of depth 1"),
    43: ("atomics left on", 1, r"the kernel ends with atomics on, since "),
    44: ("past the end of a buffer", 1, r"Duplicate at .*runs over the end of the buffer of InitBuffer at"),
    51: ("flag MTE1 to M left out", 1, r"WR: LoadData at .*Mmad at .*<MTE1_M>"),
    52: ("flag MTE2 to MTE1 left out", 1, r"WR: Nd2Nz at .*LoadData at .*<MTE2_MTE1>"),
    53: ("small products accumulate without a barrier", 1, r"WR: Mmad at .*PipeBarrier<PIPE_M>"),
    54: ("accumulator never initialised", 1, r"Mmad at .*reads bytes of L0C .*UNWRITTEN"),
    55: ("stride of the Nz form too small", 1, r"Mmad at .*the left matrix holds values UNWRITTEN"),
    56: ("L0 overwritten while it is multiplied with", 1, r"RW: Mmad at .*LoadData at .*<M_MTE1>"),
    57: ("flag M to FIX left out", 1, r"WR: Mmad at .*Fixpipe at .*<M_FIX>"),
    58: (
        "the cube core never tells the vector cores",
        1,
        r"deadlock:.*vector core 0 waits at .*CrossCoreSetFlag of id 1",
    ),
    59: ("vector cores do not wait for the cube core", 1, r"race|UNWRITTEN"),
    60: ("FP8 times FP4", 1, r"fp8_e4m3fn_t times fp4x2_e2m1_t .*both operands FP8, or both FP4"),
}


def run(which: int, blocks: int, seed: int = 1) -> None:
    x = torch.ones(4096, dtype=torch.float32)
    if which >= 50:
        x = torch.ones(8192, dtype=torch.bfloat16)
    stream = probes.twin.module().Stream(seed=seed)
    names = ["x", "y", "which", "blocks"]
    probes.twin.module().bind("probe_bugs", "ttii", names)(x, torch.zeros(4096), which, blocks, stream=stream)


@pytest.mark.parametrize("which", BUGS, ids=lambda which: BUGS[which][0].replace(" ", "-"))
def test_is_reported(which):
    _, blocks, message = BUGS[which]
    for short, words in WORDS.items():
        message = message.replace(short, words)
    for seed in (1, 2, 3):
        with pytest.raises(BackendError, match=message):
            run(which, blocks, seed)


@pytest.mark.parametrize(("which", "blocks"), [(0, 1), (32, 4), (32, 72), (50, 1)])
def test_right_kernels_pass(which, blocks):
    for seed in range(5):
        run(which, blocks, seed)


def test_the_twin_works_on_after_a_failed_launch():
    with pytest.raises(BackendError):
        run(33, 8)
    run(32, 8)
    run(50, 1)
