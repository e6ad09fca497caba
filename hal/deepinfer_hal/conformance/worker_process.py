"""One worker process as its parent sees it: commands in, answers out, and how it died."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from deepinfer_hal.conformance.verdict import CRASH, TIMEOUT


class Died(Exception):
    """The worker ended or was stopped: why, in words, and the verdict for the case it was at."""

    def __init__(self, verdict: str, message: str) -> None:
        super().__init__(message)
        self.verdict = verdict


class WorkerProcess:
    """One worker process and its answers."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "deepinfer_hal.conformance.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.errors, env=environment, text=True, encoding="utf-8",
        )  # fmt: skip
        self.answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            try:
                self.answers.put(json.loads(line))
            except ValueError:
                continue  # the last line of a process that died while writing
        self.answers.put(None)

    def send(self, command: dict[str, Any]) -> None:
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        except (BrokenPipeError, OSError):
            raise Died(CRASH, self._last_words()) from None

    def receive(self, deadline: float) -> dict[str, Any]:
        """The next answer. Died if the process ended, or was stopped because the deadline passed."""
        try:
            answer = self.answers.get(timeout=max(deadline - time.monotonic(), 0.001))
        except queue.Empty:
            self.stop()
            raise Died(TIMEOUT, "was stopped at the time limit") from None
        if answer is None:
            raise Died(CRASH, self._last_words())
        return answer

    def _last_words(self) -> str:
        code = self.process.wait()
        name = signal.Signals(-code).name if code < 0 and -code in set(signal.Signals) else f"exit status {code}"
        self.errors.seek(0)
        tail = [line for line in self.errors.read()[-4000:].decode(errors="replace").splitlines() if line.strip()]
        return f"the process died with {name}" + (f"; it said: {tail[-1][:200]}" if tail else "")

    def stop(self) -> None:
        """Ends this process, whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.stdin.close()
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.stop()
        self.errors.close()
