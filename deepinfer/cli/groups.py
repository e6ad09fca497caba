"""Options shared by commands are dataclasses: a command takes one whole, and its fields become flags."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup


def spread_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with each parameter annotated by a dataclass replaced by that dataclass's fields, as Typer reads them."""
    hints = get_type_hints(function, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type] = {}
    for parameter in inspect.signature(function).parameters.values():
        annotation = hints[parameter.name]
        if is_dataclass(annotation):
            groups[parameter.name] = annotation
            parameters += _field_parameters(annotation)
        else:
            parameters.append(parameter.replace(annotation=annotation, kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(function)
    def call(**values: Any) -> Any:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        return function(**values)

    call.__signature__ = inspect.Signature(parameters)
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _field_parameters(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    result = []
    for field in fields(group):
        default = field.default if field.default is not MISSING else field.default_factory()
        kind = inspect.Parameter.KEYWORD_ONLY
        result.append(inspect.Parameter(field.name, kind, default=default, annotation=hints[field.name]))
    return result


def device_epilog() -> str:
    """What the devices at hand support, for the end of a help text. Never raises: help must work on a broken machine."""
    try:
        from deepinfer.cli.hal import device_lines

        return "Devices here. " + " ".join(device_lines())
    except Exception as error:
        return f"Devices here. Unknown: {error}"


class _LateEpilog:
    """Asks the devices only when help is really printed."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.epilog = device_epilog()
        super().format_help(ctx, formatter)


class Command(_LateEpilog, TyperCommand):
    """A command whose help ends with what the current devices support."""


class Group(_LateEpilog, TyperGroup):
    """A group of commands whose help ends with what the current devices support."""


def new_app(help: str) -> typer.Typer:
    """A group of commands in this project's style."""
    return typer.Typer(cls=Group, help=help, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)


def add_command(app: typer.Typer, name: str, function: Callable[..., Any]) -> None:
    """Adds `function`, which returns the exit status, as a command."""
    app.command(name, cls=Command)(spread_options(function))
