"""A command's options, made from the settings that it takes: a knob is one line, in the dataclass
beside its owner."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

import typer

from dnis_torchrec.cli.app import app, arguments


@dataclass(frozen=True)
class Fields:
    """Asks for the options of settings as a dict."""

    of: type
    given_only: bool = False


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Makes a function a command of `dnis`, its name and docstring the command's."""
    return app.command()(with_options(function))


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """The function as typer takes it: with an option for each field in place of the settings."""
    signature = inspect.signature(function, eval_str=True)
    settings = {
        name: asked
        for name, parameter in signature.parameters.items()
        if (asked := _asked(parameter))
    }
    options = {name: list(_options(asked)) for name, asked in settings.items()}
    all_of_them = [
        each for name, own in signature.parameters.items() for each in options.get(name, [own])
    ]
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in all_of_them]

    @functools.wraps(function)
    def run(**given: Any) -> None:
        with arguments():
            for name, asked in settings.items():
                values = {option.name: given.pop(option.name) for option in options[name]}
                if asked.given_only:
                    values = {
                        option: value for option, value in values.items() if value is not None
                    }
                    asked.of(**values)
                is_whole = signature.parameters[name].annotation is asked.of
                given[name] = asked.of(**values) if is_whole else values
        function(**given)

    run.__dict__["__signature__"] = signature.replace(parameters=parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _asked(parameter: inspect.Parameter) -> Fields | None:
    """The settings that a parameter asks for; None where it is an argument or an option itself."""
    if is_dataclass(parameter.annotation) and isinstance(parameter.annotation, type):
        return Fields(parameter.annotation)
    return next((part for part in get_args(parameter.annotation) if isinstance(part, Fields)), None)


def _options(asked: Fields) -> Iterator[inspect.Parameter]:
    types = get_type_hints(asked.of, include_extras=True)
    for part in fields(asked.of):
        kind, *texts = (
            get_args(types[part.name]) if hasattr(types[part.name], "__metadata__") else (None,)
        )
        if texts:
            # A switch that is off can only be switched on; one that is on goes both ways.
            names = (f"--{part.name.replace('_', '-')}",) if part.default is False else ()
            yield inspect.Parameter(
                part.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None if asked.given_only else part.default,
                annotation=Annotated[
                    kind | None if asked.given_only else kind, typer.Option(*names, help=texts[0])
                ],
            )
