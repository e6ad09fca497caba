"""The process that runs cases: commands come as JSON lines on standard input, answers go out as JSON lines.

    {"do": "open", "plan": {...}}  -> {"opened": {...}} or {"error": "...", "kind": "..."}
    {"do": "run", "items": [...]}  -> {"start": n}, {"check": name}, {"result": {...}} for each, then {"done": true}

A kernel that fails on its device can leave nothing there that works for this process. Then {"lost": true} follows its
result and the process ends, so that the next cases are judged by one whose device works.

Whatever a kernel prints goes to standard error, so that it cannot break the protocol.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

Send = Callable[[dict[str, Any]], None]


def main() -> int:
    """Serves until standard input ends. A terminal's Ctrl-C goes to all its processes; the parent ends this one where it must."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = _private_output()

    def send(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    session = None
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "open":
            session = _open(command["plan"], send)
        elif session is not None:
            for item in command["items"]:
                session.run(item)
                if session.lost:
                    send({"lost": True})
                    return 0
            send({"done": True})
    return 0


def _private_output() -> TextIO:
    """The pipe to the parent; file descriptor 1 becomes standard error."""
    mine = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return mine


def _open(values: dict[str, Any], send: Send) -> Session | None:
    from deepinfer_hal.conformance.host import describe_subject
    from deepinfer_hal.conformance.plan import Plan, expand, open_subject

    try:
        plan = Plan.from_dict(values)
        backend, index = open_subject(plan)
        session = Session(plan, backend, index, send)
        items = [vars(item) for item in expand(plan, backend, index)]
        send({"opened": {"subject": describe_subject(backend, index), "items": items}})
    except Exception as error:
        send({"error": str(error), "kind": type(error).__name__})
        return None
    return session


class Session:
    """An opened backend and what is tested on it."""

    def __init__(self, plan: Any, backend: Any, index: int, send: Send) -> None:
        from deepinfer_hal.conformance.plan import subjects

        self.plan, self.backend, self.index, self.send = plan, backend, index, send
        self.lost = False
        self.subjects = subjects(backend, index, plan.reference)
        self.emulated = any(info.emulated for info in backend.probe() if info.index == index)

    def run(self, values: dict[str, Any]) -> None:
        """Runs one item and sends its result."""
        from deepinfer_hal.conformance.plan import SYSTEM, Item

        item = Item(**values)
        self.send({"start": item.id})
        result = self._system(item) if item.source == SYSTEM else self._case(item)
        told = [RuntimeError(text) for text in result.failures.values()]
        self.lost = any(self.backend.classify_error(error) == "device_lost" for error in told)
        self.send({"result": result.to_dict()})

    def _case(self, item: Any) -> Any:
        from deepinfer_hal.card import Case
        from deepinfer_hal.conformance.cases import parse_case
        from deepinfer_hal.conformance.checks import get_profile
        from deepinfer_hal.conformance.execute import run_case, share_repetitions
        from deepinfer_hal.conformance.plan import TRACE

        pristine = None
        if item.source == TRACE:
            case, pristine = Case(item.op), self._recorded(item.id)
        else:
            case = parse_case(item.id)
        profile = share_repetitions(get_profile(self.plan.profile), item.share, self.emulated)
        result = run_case(
            self.subjects[item.op, item.symbol], case, profile, self.plan.table(), seed=self.plan.seed, first=item.first,
            pristine=pristine, on_check=lambda name: self.send({"check": name}),
        )  # fmt: skip
        result.id = item.id
        return result

    def _recorded(self, id: str) -> dict[str, Any]:
        from deepinfer_hal.conformance.traces import load_call, trace_ids

        path = next(path for path in self.plan.traces if id in trace_ids(path))
        return load_call(path, id)

    def _system(self, item: Any) -> Any:
        from deepinfer_hal.conformance.cases import system_cases
        from deepinfer_hal.conformance.verdict import FAIL, PASS, UNSUPPORTED, CaseResult, CheckFailed, Declined

        case = next(case for case in system_cases(self.plan.profile) if case.id == item.id)
        result, started = CaseResult(item.id, item.op, self.backend.name), time.perf_counter()
        self.send({"check": "system"})
        try:
            result.facts = case.run(self.backend, self.index) or {}
            result.verdict, result.checks = PASS, ["system"]
        except Declined as error:
            result.verdict, result.reason = UNSUPPORTED, str(error)
        except CheckFailed as error:
            result.verdict, result.failures, result.facts = FAIL, {"system": str(error)}, error.facts
        except Exception as error:
            result.verdict, result.failures = FAIL, {"system": f"{type(error).__name__}: {error}"}
        result.seconds = time.perf_counter() - started
        return result


if __name__ == "__main__":
    sys.exit(main())
