"""What of a rank's slice is measured: the sizes of its steps."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.bench.extrapolate import DRAFTS
from deepinfer.errors import ConfigError


@dataclass(frozen=True)
class Workload:
    """requests: sequences of the decode steps; verify: of the verify steps, some of those; context: tokens before each; prefill:
    tokens of the prefill steps, from the start of a sequence; ops_at: of which request counts and prefill sizes every op is
    timed; gap_steps: decode steps of the engine's own loop, at each request count of ops_at. seconds: steps that would begin
    later than so long after the start are left out; 0: none is. verify_ops_at: request counts of which the ops of the verify
    step alone are timed."""

    requests: tuple[int, ...]
    verify: tuple[int, ...]
    context: int
    prefill: tuple[int, ...]
    ops_at: tuple[int, ...]
    gap_steps: int = 0
    seconds: float = 0.0
    verify_ops_at: tuple[int, ...] = ()

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max((self.context if self.requests else 0, *self.prefill))

    @property
    def loops(self) -> tuple[int, ...]:
        """Sequences of the engine's own loops."""
        return tuple(one for one in self.requests if one in self.ops_at) if self.gap_steps else ()

    def lists_ops(self, kind: str, size: int) -> bool:
        """Whether every op is timed of a step of that kind, of so many requests, or tokens of a prefill."""
        return size in self.ops_at or (kind == "verify" and size in self.verify_ops_at)

    def check(self) -> None:
        """ConfigError for sizes of which there can be no step."""
        if not self.requests and not self.prefill:
            raise ConfigError("requests", "there is neither a decode nor a prefill step: give some with --requests or --prefill")
        if strange := sorted(set(self.verify) - set(self.requests)):
            raise ConfigError("verify", f"{strange[0]} is none of --requests {', '.join(map(str, self.requests)) or '-'}")
        if strange := sorted(set(self.verify_ops_at) - set(self.verify)):
            raise ConfigError("verify_ops_at", f"{strange[0]} is none of --verify {', '.join(map(str, self.verify)) or '-'}")
        for name, sizes in (("requests", self.requests), ("prefill", self.prefill)):
            if min(sizes, default=1) < 1:
                raise ConfigError(name, f"{min(sizes)} is no size of a step: give numbers from 1 on, or `-` for none")
        if self.requests and self.context < 1 + DRAFTS:
            raise ConfigError("context", f"{self.context} does not hold the tokens of a verify step: give {1 + DRAFTS} or more")
