"""The Ascend backend: AscendC kernels on an NPU, or on the twin, a functional model of an Ascend 950."""
