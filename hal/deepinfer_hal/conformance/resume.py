"""What a run may keep of an earlier report: cases that passed, on the same device, of the same sources, in the same plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepinfer_hal.conformance.host import describe_suite
from deepinfer_hal.conformance.plan import Plan
from deepinfer_hal.conformance.verdict import PASS, CaseResult
from deepinfer_hal.errors import BadCall

_SAME_SUBJECT = ("backend", "index", "device", "details", "build", "kernels")
_SAME_PLAN = ("spec", "profile", "reference", "seed", "checks")


@dataclass(frozen=True)
class Earlier:
    """Passed results of an earlier report by (case id, symbol), and the checksum of that report."""

    passed: Mapping[tuple[str, str], CaseResult] = field(default_factory=dict)
    checksum: str = ""

    @classmethod
    def of(cls, report: Mapping[str, Any] | None, plan: Plan, subject: Mapping[str, Any]) -> Earlier:
        """BadCall, naming every difference, for a report of other sources of the suite, of another device or build, or of
        another plan: what passed there says nothing here. BadCall too for one that is not as the suite wrote it."""
        from deepinfer_hal.conformance.report import require_intact  # it imports the runner, which imports this

        if report is None:
            return cls()
        require_intact(report, "resume")
        other = [name for name in _SAME_SUBJECT if report["subject"][name] != subject[name]]
        other += [name for name in _SAME_PLAN if _plain(report["plan"][name]) != _plain(plan.to_dict()[name])]
        if report["suite"]["source_sha256"] != describe_suite()["source_sha256"]:
            other.append("sources of the suite")
        if other:
            raise BadCall(f"the report to resume is of something else, its {', '.join(other)} differ: run without it")
        results = [CaseResult.from_dict(result) for result in report["results"] if result["verdict"] == PASS]
        return cls({(result.id, result.symbol): result for result in results}, report["checksum"])

    def told(self) -> dict[str, Any]:
        """For the next report: what it was made from; empty where it was made from nothing."""
        return {"checksum": self.checksum, "passed": len(self.passed)} if self.checksum else {}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
