"""Reading checkpoints in the released format: what must be there, what is there, and how many bytes it all takes."""

from deepinfer.checkpoint.reader import Checkpoint, TensorEntry, open_checkpoint
from deepinfer.checkpoint.tensors import TensorSpec, expected_tensors

__all__ = ["Checkpoint", "TensorEntry", "TensorSpec", "expected_tensors", "open_checkpoint"]
