"""How long a kernel might take on an Ascend 950: a trace of the twin replayed through in-order pipes. Always an estimate."""

from deepinfer_ascend.estimate.chips import CHIPS, Chip, find_chip
from deepinfer_ascend.estimate.problems import Problem, find_problem, problems
from deepinfer_ascend.estimate.replay import Replay, replay
from deepinfer_ascend.estimate.report import as_text, estimate, summarise

__all__ = [
    "CHIPS", "Chip", "Problem", "Replay", "as_text", "estimate", "find_chip", "find_problem", "problems", "replay", "summarise",
]  # fmt: skip
