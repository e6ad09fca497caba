"""What the codes and words of CANN's errors mean, and what is likely behind them.

A code's meaning is that of the documentation page or of the public thread named with it; nothing here was seen on an
NPU. Codes that are not listed are read by the documented rule of their first digit.
"""

from __future__ import annotations

import re

from deepinfer_hal.meanings import A_FOREIGN_ADDRESS, DEVICE_LOST, OUT_OF_MEMORY, UNKNOWN, Meaning

_DOCS = "https://www.hiascend.com/document/detail/en/CANNCommunityEdition"
_ACL = f"{_DOCS}/910/API/runtimeapi/aclcppdevg_03_6666.html"
_ACLNN = f"{_DOCS}/910/API/aolapi/atlasascendc_api_07_1205.html"
_HCCL = f"{_DOCS}/900/API/hcclug"

_TILE = "a tile larger than the core's memory, or an address that is no multiple of 32: run the same call on the twin"
_LOGS = "the cause is in the plog, under $HOME/ascend/log/[run|debug]/plog; send it along"

CODES = {
    meaning.words[0]: meaning
    for meaning in (
        Meaning(
            ("107001",),
            "no device of that index",
            ("ASCEND_RT_VISIBLE_DEVICES leaves fewer devices than the ranks use",),
            UNKNOWN,
            "https://docs.rs/cann-sys/0.1.3/cann_sys/acl_error_code/",
        ),
        Meaning(
            ("107002",),
            "the context is empty: no device was set in this thread",
            ("a thread of our own made a call before torch_npu.npu.set_device", "set_device itself failed: see the first error"),
            UNKNOWN,
            "https://github.com/lm-sys/FastChat/issues/2842",
        ),
        Meaning(
            ("107003",),
            "the stream is not one of the current context",
            ("a stream of another device was handed to a kernel",),
            UNKNOWN,
            "https://docs.rs/cann-sys/0.1.3/cann_sys/acl_error_code/",
        ),
        Meaning(
            ("107027",),
            "the stream is being captured, and the call is not allowed there",
            (
                "a value was read on the host, or a stream waited for, inside a captured step: kernels that say capturable "
                "must do neither",
            ),
            UNKNOWN,
            "https://github.com/vllm-project/vllm-ascend/issues/16736",
        ),
        Meaning(
            ("107030",),
            "a captured graph failed: seen when graphs are replayed beside speculative decoding",
            (
                "the graph was captured with other addresses, or another graph was being captured at the time",
                "run the step without graphs; if it is right then, send both",
            ),
            UNKNOWN,
            "https://github.com/vllm-project/vllm-ascend/issues/8587",
        ),
        Meaning(
            ("161001",),
            "an argument that must not be null is null (aclnn)",
            ("a vendor op was called without a tensor it needs",),
            UNKNOWN,
            _ACLNN,
        ),
        Meaning(
            ("161002",),
            "an argument is not valid, such as two dtypes that do not go together (aclnn)",
            ("this release of CANN wants other dtypes than its documentation names: `deepinfer hal prove` turns the op off",),
            UNKNOWN,
            _ACLNN,
        ),
        Meaning(
            ("207001",),
            "memory could not be allocated",
            (
                "the plan left too little free: graphs and HCCL buffers come on top of it",
                "another process holds memory of this device: npu-smi info",
            ),
            OUT_OF_MEMORY,
            "https://github.com/vllm-project/vllm-ascend/issues/3141",
        ),
        Meaning(
            ("207018",),
            "memory of the device is exhausted",
            ("as 207001",),
            OUT_OF_MEMORY,
            "https://docs.rs/cann-sys/0.1.3/cann_sys/acl_error_code/",
        ),
        Meaning(
            ("361001",),
            "a runtime call inside a vendor op failed (aclnn)",
            ("memory, or an error before this one", _LOGS),
            UNKNOWN,
            _ACLNN,
        ),
        Meaning(
            ("507011",),
            "the execution of a captured model failed",
            ("an op inside the graph failed: the text names the core",),
            DEVICE_LOST,
            "https://github.com/vllm-project/vllm-ascend/issues/8360",
        ),
        Meaning(
            ("507014",),
            "a kernel on a cube core did not end in time",
            ("cores wait for each other: a flag is never set", _LOGS),
            DEVICE_LOST,
            "https://docs.rs/cann-sys/0.1.3/cann_sys/acl_error_code/",
        ),
        Meaning(
            ("507015",),
            "a kernel on a cube core failed",
            (A_FOREIGN_ADDRESS, "the kernels were built for another architecture than dav-3510"),
            DEVICE_LOST,
            "https://github.com/tile-ai/tilelang-ascend/issues/1830",
        ),
        Meaning(
            ("507017",),
            "an AI CPU operator did not end in time",
            ("its input is very large", _LOGS),
            DEVICE_LOST,
            f"{_DOCS}/910/maintenref/troubleshooting/troubleshooting_0153.html",
        ),
        Meaning(
            ("507018",),
            "an AI CPU operator failed",
            (
                "HCCL: another rank failed first, or ranks called different collectives: read the log of every rank",
                "an operator that only the AI CPU has got a value it cannot take",
            ),
            DEVICE_LOST,
            f"{_DOCS}/910/maintenref/troubleshooting/troubleshooting_0151.html",
        ),
        Meaning(
            ("507033",),
            "the device could not be opened",
            ("another process holds it, or its memory is full", _LOGS),
            DEVICE_LOST,
            "https://github.com/hw-native-sys/PTOAS/pull/341",
        ),
        Meaning(
            ("507034",),
            "a kernel on a vector core did not end in time",
            (
                "a dispatch or combine waits for a rank that is gone: look at the other ranks",
                "a kernel of ours waits for a flag that nobody sets: the twin reports that as a deadlock",
            ),
            DEVICE_LOST,
            "https://www.hiascend.com/forum/thread-0201177680189137012-1-1.html",
        ),
        Meaning(
            ("507035",),
            "a kernel on a vector core failed",
            (A_FOREIGN_ADDRESS, _TILE),
            DEVICE_LOST,
            "https://github.com/vllm-project/vllm-ascend/issues/3263",
        ),
        Meaning(
            ("507048",),
            "waiting for the device took too long",
            ("a kernel hangs, or a rank is gone", _LOGS),
            DEVICE_LOST,
            "https://github.com/vllm-project/vllm-ascend/issues/1443",
        ),
        Meaning(
            ("507057",),
            "an error of another device is suspected",
            ("another rank failed first: read its log",),
            DEVICE_LOST,
            "https://github.com/vllm-project/vllm-ascend/issues/10829",
        ),
        Meaning(
            ("561000",),
            "an inner error of a vendor op (aclnn)",
            ("CANN and torch_npu are of different releases", "the op does not serve this chip or shape: `deepinfer hal prove`"),
            UNKNOWN,
            _ACLNN,
        ),
        Meaning(
            ("561001",),
            "a vendor op could not infer the shape of its result (aclnn)",
            ("a shape it does not serve",),
            UNKNOWN,
            _ACLNN,
        ),
        Meaning(
            ("561002",),
            "a vendor op could not choose its tiles (aclnn)",
            ("a shape it does not serve on this chip",),
            UNKNOWN,
            _ACLNN,
        ),
        Meaning(
            ("561003",),
            "a vendor op has no kernel here (aclnn)",
            ("the package of binary kernels for Ascend 950 is not installed",),
            UNKNOWN,
            _ACLNN,
        ),
        Meaning(
            ("561101",),
            "a vendor op could not make its executor (aclnn)",
            ("the operating system refused something",),
            UNKNOWN,
            _ACLNN,
        ),
    )
}

WORDS = (
    Meaning(
        ("NPU out of memory",),
        "torch_npu's allocator found no room",
        ("as 207001",),
        OUT_OF_MEMORY,
        "https://github.com/vllm-project/vllm-ascend/issues/19",
    ),
    Meaning(
        ("EL0004",),
        "memory could not be allocated",
        ("as 207001",),
        OUT_OF_MEMORY,
        "https://github.com/vllm-project/vllm-ascend/issues/3141",
    ),
    Meaning(
        ("The DDR address of the MTE instruction is out of range",),
        "a copy touched global memory that is nobody's",
        (A_FOREIGN_ADDRESS,),
        DEVICE_LOST,
        "https://github.com/vllm-project/vllm-ascend/issues/3263",
    ),
    Meaning(
        ("the ub address out of bounds",),
        "a vector instruction touched bytes behind the end of UB",
        (_TILE,),
        DEVICE_LOST,
        "https://github.com/hw-native-sys/PTOAS/pull/1161",
    ),
    Meaning(
        ("EI0002",),
        "HCCL: another rank did not come to a collective in time",
        ("ranks called different collectives or sizes, or one failed before: read the log of every rank",),
        DEVICE_LOST,
        f"{_HCCL}/hcclug_000059.html",
    ),
    Meaning(
        ("EI0006",),
        "HCCL: ranks could not connect",
        ("addresses, ports, or HCCL_CONNECT_TIMEOUT",),
        DEVICE_LOST,
        f"{_HCCL}/hcclug_000050.html",
    ),
    Meaning(
        ("Cannot prepare for replay during capturing stage",),
        "a graph was replayed while another was being captured",
        ("capture all graphs before the first replay",),
        UNKNOWN,
        "https://github.com/vllm-project/vllm-omni/pull/6639",
    ),
)

_RULES = {
    "1": ("the environment or the way of calling is wrong", UNKNOWN),
    "2": ("a resource ran out, or the call does not fit this hardware", UNKNOWN),
    "3": ("the state of a queue or service does not allow it", UNKNOWN),
    "5": ("hardware or software failed inside", DEVICE_LOST),
}
_CODE = re.compile(r"(?<![\w.])([1235]\d{5})(?![\w.])")
_NAMED = re.compile(r"(?:error code|ret|result|retCode|ErrCode|failed)\D{0,12}([1235]\d{5})(?!\w)", re.IGNORECASE)


def _by_rule(code: str) -> Meaning:
    if code.startswith("561"):
        return Meaning((code,), "not listed here; an inner error of a vendor op (aclnn)", (_LOGS,), UNKNOWN, _ACLNN)
    says, kind = _RULES[code[0]]
    return Meaning((code,), f"not listed here; by its first digit, {says}", (_LOGS,), kind, _ACL)


def explain(text: str) -> list[Meaning]:
    """Every error that a code or the words of a message speak of; empty if it names none. In a longer text a number that
    is not introduced as a code counts if the table has it."""
    stripped = text.strip()
    listed = [code for code in _CODE.findall(text) if code in CODES]
    return _meanings([stripped] if _CODE.fullmatch(stripped) else [*_NAMED.findall(text), *listed], text)


def classify(text: str) -> str:
    """The worst that a message speaks of, as `Backend.classify_error` names it; only codes that are introduced as such
    count. Memory comes first: it can be given back."""
    kinds = {meaning.kind for meaning in _meanings(_NAMED.findall(text), text)}
    return next((kind for kind in (OUT_OF_MEMORY, DEVICE_LOST) if kind in kinds), UNKNOWN)


def _meanings(codes: list[str], text: str) -> list[Meaning]:
    found = [CODES.get(code) or _by_rule(code) for code in dict.fromkeys(codes)]
    return found + [meaning for meaning in WORDS if meaning.words[0].casefold() in text.casefold()]
