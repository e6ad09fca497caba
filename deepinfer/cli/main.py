"""Entry point: runs a command and turns every error into one line that says what to do.

Exit status: 0 done, 1 failed, 2 the command line itself was wrong, 130 interrupted. `--debug`, anywhere on the line, lets
the traceback through.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

DEBUG_FLAG = "--debug"
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `deepinfer` with the given arguments (default: the process's) and returns the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = DEBUG_FLAG in _before_separator(arguments)
    if debug:
        arguments.remove(DEBUG_FLAG)
    try:
        status = _run(arguments)
        if status == _INTERRUPTED:  # the command line's library has turned the interrupt into a status
            raise KeyboardInterrupt
        return status
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever read our output has gone: nothing more to say
        return 0
    except Exception as error:
        if debug:
            raise
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return 1


def _run(arguments: list[str]) -> int:
    try:
        import typer

        from deepinfer.cli.app import app
    except ImportError as error:
        if arguments[:1] == ["collect-env"]:
            from deepinfer.cli.environment import collect_env_without_packages

            return collect_env_without_packages(as_json="--json" in arguments)
        raise RuntimeError(f"{error}; install the package's requirements: pip install deepinfer") from error
    usage_error = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")
    try:
        status = app(arguments, prog_name="deepinfer", standalone_mode=False)
    except typer.Abort:
        print("aborted", file=sys.stderr)
        return 1
    except usage_error as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "deepinfer"
        message = " ".join(error.format_message().split()).rstrip(".")
        print(f"error: {message}; see `{command} --help`", file=sys.stderr)
        return error.exit_code
    return status if isinstance(status, int) else 0


def _before_separator(arguments: list[str]) -> list[str]:
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def _one_line(error: Exception) -> str:
    """Our errors speak for themselves; others are named, with the way to see more."""
    message = " ".join(str(error).split())
    try:
        from deepinfer.errors import DeepInferError
    except ImportError:
        return message
    if isinstance(error, (DeepInferError, OSError)) or type(error) is RuntimeError:
        return message
    return f"{type(error).__name__}: {message} (unexpected; run again with {DEBUG_FLAG} for the traceback)"


if __name__ == "__main__":
    sys.exit(main())
