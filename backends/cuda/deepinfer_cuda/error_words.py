"""What the words of CUDA's and NCCL's errors mean, and what is likely behind them.

Names and meanings are those of the page or public thread named with each.
"""

from __future__ import annotations

from deepinfer_hal.meanings import A_FOREIGN_ADDRESS, DEVICE_LOST, OUT_OF_MEMORY, UNKNOWN, Meaning

_RUNTIME = "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html"
_XID = "https://docs.nvidia.com/deploy/xid-errors/index.html"
_NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
_TORCH_NCCL = "https://pytorch.org/docs/stable/torch_nccl_environment_variables.html"

_LATER = "the call that reports it is not the one that failed: run again with CUDA_LAUNCH_BLOCKING=1"
_LOST = "the context is broken: every later call fails, and the process must be started again"
_HARDWARE = "the kernel log has the Xid (dmesg | grep Xid); the GPU is reset, or taken out of service, before it is used again"

MEANINGS = (
    Meaning(
        ("cudaErrorAssert", "device-side assert triggered"),
        "an assertion in device code failed",
        ("an id outside a table of torch's own ops (gather, index_select, embedding)", _LATER, _LOST),
        DEVICE_LOST,
        _RUNTIME,
    ),
    Meaning(
        ("cudaErrorIllegalAddress", "illegal memory access was encountered", "CUDA_ERROR_ILLEGAL_ADDRESS"),
        "a kernel read or wrote an address that is not its own",
        (A_FOREIGN_ADDRESS, _LATER, "compute-sanitizer names the kernel and the address", _LOST),
        DEVICE_LOST,
        _RUNTIME,
    ),
    Meaning(
        ("cudaErrorMisalignedAddress", "misaligned address"),
        "a kernel used an address that is no multiple of the size it reads",
        ("a view that does not start at a multiple of 16 bytes was given to a kernel compiled for one that does", _LATER, _LOST),
        DEVICE_LOST,
        _RUNTIME,
    ),
    Meaning(
        ("cudaErrorLaunchFailure", "unspecified launch failure"),
        "a kernel ended with an exception that has no name of its own",
        (A_FOREIGN_ADDRESS, _LATER, _LOST),
        DEVICE_LOST,
        _RUNTIME,
    ),
    Meaning(
        ("cudaErrorLaunchTimeout", "launch timed out and was terminated"),
        "a kernel ran longer than the system allows",
        ("a display hangs on this GPU, and its watchdog ends long kernels", _LOST),
        DEVICE_LOST,
        _RUNTIME,
    ),
    Meaning(
        ("cudaErrorIllegalInstruction", "illegal instruction was encountered"),
        "the machine code holds an instruction that this GPU does not have",
        ("code of another architecture in the kernel cache: empty TRITON_CACHE_DIR", _LOST),
        DEVICE_LOST,
        _RUNTIME,
    ),
    Meaning(
        ("cudaErrorECCUncorrectable", "uncorrectable ECC error"),
        "the GPU's memory lost bits that it could not restore",
        ("a failing memory cell: Xid 48, 63, 64, 94 or 95", _HARDWARE),
        DEVICE_LOST,
        f"{_RUNTIME} and {_XID}",
    ),
    Meaning(
        ("cudaErrorNvlinkUncorrectable", "uncorrectable NVLink error", "uncorrectable nvlink error"),
        "a link between GPUs lost data",
        ("a link or switch fails: Xid 74", _HARDWARE),
        DEVICE_LOST,
        f"{_RUNTIME} and {_XID}",
    ),
    Meaning(
        ("GPU has fallen off the bus", "GPU is lost"),
        "the driver cannot reach the GPU any more",
        ("power, heat or the slot: Xid 79", _HARDWARE),
        DEVICE_LOST,
        _XID,
    ),
    Meaning(
        ("cudaErrorMemoryAllocation", "CUDA out of memory", "CUDA error: out of memory", "CUDA_ERROR_OUT_OF_MEMORY"),
        "the GPU has not enough free memory",
        ("another process holds memory (nvidia-smi lists them)", "fewer blocks or requests: `deepinfer check` prints the plan"),
        OUT_OF_MEMORY,
        _RUNTIME,
    ),
    Meaning(
        ("cudaErrorNoKernelImageForDevice", "no kernel image is available"),
        "torch holds no code for this GPU's compute capability",
        ("a torch built for other architectures: torch.cuda.get_arch_list() has them",),
        UNKNOWN,
        _RUNTIME,
    ),
    Meaning(
        ("out of resource: shared memory", "OutOfResources"),
        "a Triton tile needs more shared memory or registers than this GPU has",
        ("a kernel's target is not this GPU's: see deepinfer_triton/targets.py",),
        UNKNOWN,
        "https://github.com/triton-lang/triton/issues/8182",
    ),
    Meaning(
        (
            "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing",
            "cudaErrorStreamCaptureInvalidated",
        ),
        "something that cannot be captured was done while a step was captured",
        ("a value was read on the host, the driver allocated memory, or a kernel was loaded for the first time",),
        UNKNOWN,
        _RUNTIME,
    ),
    Meaning(
        ("NCCL watchdog", "Watchdog caught collective operation timeout", "ncclRemoteError", "ncclTimeout"),
        "a collective did not end in its time: some rank never joined it, or died in it",
        (
            "another rank failed first: the earliest error among all ranks is the cause",
            "ranks made their calls in different orders; the communicator's own errors name the rank",
            "a link that is blocked: NCCL_DEBUG=INFO prints the transports that were chosen",
        ),
        DEVICE_LOST,
        _TORCH_NCCL,
    ),
    Meaning(
        ("ncclUnhandledCudaError", "ncclSystemError", "ncclInternalError", "NCCL error"),
        "NCCL could not do a call",
        ("NCCL_DEBUG=WARN prints the cause on the rank that failed", "too little shared memory in a container: /dev/shm"),
        UNKNOWN,
        _NCCL,
    ),
)  # fmt: skip


def explain(text: str) -> list[Meaning]:
    """Every error whose words stand in `text`, in the order of the table."""
    return [meaning for meaning in MEANINGS if any(words in text for words in meaning.words)]


def classify(text: str) -> str:
    """The worst kind among what `text` names: a lost device before lacking memory before "unknown"."""
    kinds = {meaning.kind for meaning in explain(text)}
    return next((kind for kind in (DEVICE_LOST, OUT_OF_MEMORY) if kind in kinds), UNKNOWN)
