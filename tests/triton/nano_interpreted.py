"""nano over the CUDA backend's offers, in Triton's interpreter on host memory: what `test_cuda_nano.py` runs in the
environment that has Triton. `python -m tests.triton.nano_interpreted TOKENS CHUNK` prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint

import numpy as np
from deepinfer_cuda import kernels
from deepinfer_hal import registry
from deepinfer_hal.kernel import Kernel
from deepinfer_triton.targets import INTERPRETER

from deepinfer.config import EngineConfig
from deepinfer.model_path import PACKAGED_MODELS
from deepinfer.runner.load import load
from deepinfer.runner.runner import Runner
from tests.unit.cuda_on_host import CudaOnHost

NANO = PACKAGED_MODELS / "nano"


class Interpreted(CudaOnHost):
    """The stand-in's GPU, whose kernels are those that a GPU is offered, made for the interpreter."""

    def kernels(self, index: int) -> Sequence[Kernel]:
        kernels.cuda_target = lambda major, minor: INTERPRETER
        kernels.native.kernels = lambda capability, device: []  # the library, where it was built, reads no host memory
        return super().kernels(index)


def opened(spec: str) -> tuple[Interpreted, int]:
    """For the conformance suite's workers."""
    return Interpreted(), 0


def runner(backend: str) -> Runner:
    sizes = {"max_model_len": 128, "max_num_seqs": 1, "max_num_batched_tokens": 64, "num_blocks": 4}
    return Runner(load(EngineConfig.create(model=str(NANO), backend=backend, **sizes)))


def main(tokens: int, chunk: int) -> None:
    """Scores the end of a stored prompt and its first greedy tokens, `tokens` in all, `chunk` rows a step; 0 only binds."""
    found = registry._entries
    stand_in = EntryPoint("cuda", f"{__name__}:Interpreted", registry.GROUP)
    registry._entries = lambda: {**found(), "cuda": stand_in}  # before the package's own, where that is installed
    made = runner("cuda")
    told = {"choices": sorted(f"{choice.op} {choice.provider}" for choice in made.loaded.dispatcher.table())}
    if tokens:
        told |= scores(made, tokens, chunk)
    print(json.dumps(told))


def scores(made: Runner, tokens: int, chunk: int) -> dict[str, object]:
    """The likeliest token after each position by the CPU's kernels and by `made`, and how far apart they are."""
    stored = json.loads((NANO / "agreement.json").read_text("utf-8"))
    text = np.array(stored["prompts"][0][-tokens // 2 :] + stored["greedy"][0][: tokens // 2], np.int32)
    cpu, found = runner("cpu").score(text, chunk), made.score(text, chunk)
    best = np.sort(cpu, axis=-1)
    return {
        "cpu": cpu.argmax(-1).tolist(), "cuda": found.argmax(-1).tolist(), "gap": (best[:, -1] - best[:, -2]).tolist(),
        "tau": stored["tau"]["fp8_32"], "kl": float((np.exp(cpu) * (cpu - found)).sum(-1).mean()),
        "largest_difference": float(np.abs(cpu - found).max()),
    }  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
