"""The toy chip as a backend: three functions for the first token, one more for its kernels."""

# [first token]
import torch
from deepinfer_hal.backend import Backend, Capabilities, DeviceInfo, MemoryInfo
from deepinfer_hal.errors import BackendUnavailable


class ToychipBackend(Backend):
    """The toy chip; the references run every op that it has no kernel for."""

    name = "toychip"

    def probe(self):
        try:
            import toychip
        except ImportError as error:
            raise BackendUnavailable(f"toychip: {error}") from error
        return [DeviceInfo(index, "toy chip", emulated=True) for index in range(toychip.device_count())]

    def device(self, index):
        return torch.device("toychip", index)

    def capabilities(self, index):
        return Capabilities(stream_dtypes=(torch.bfloat16, torch.float32))

    # [/first token]

    # [kernels]
    def kernels(self, index):
        from deepinfer_toychip.native import library, supports

        return library().kernels("toychip", invariant="yes", supports=supports)

    # [/kernels]

    def memory_info(self, index):
        from deepinfer_toychip.native import memory_info

        return MemoryInfo(*memory_info())
