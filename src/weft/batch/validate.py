"""Validates the input of a batch before any of its lines is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.batch.demand import Demand, demand_of
from weft.batch.lines import InputFile
from weft.core.errors import ParameterError, WeftError

MOST_ERRORS = 100  # told of one input


def examine(
    source: InputFile, endpoint: str, stopped: Callable[[], bool] = lambda: False
) -> tuple[list[dict[str, Any]], Demand]:
    """What is wrong with an input, and how much work it is.

    Args:
        stopped: nobody wants to know any more.

    Returns:
        OpenAI's error objects of lines that are no requests to the batch's endpoint, the first
        ones, and what the others ask for.
    """
    demand = Demand()
    if not len(source):
        return [describe(ParameterError("The file has no lines."), code="empty_file")], demand
    errors: list[dict[str, Any]] = []
    for index in range(len(source)):
        if len(errors) == MOST_ERRORS or stopped():
            break
        try:
            line = source.line(index)
        except WeftError as error:
            errors.append(describe(error, source.number(index)))
            continue
        if line.url != endpoint:
            other = ParameterError(
                f"url must be that of the batch, {endpoint}, not {line.url}.", param="url"
            )
            errors.append(describe(other, source.number(index), code="mismatched_url"))
        demand += demand_of(line)
    return errors, demand


def describe(
    error: WeftError, number: int | None = None, code: str | None = None
) -> dict[str, Any]:
    """An entry of a batch's list of errors."""
    code = error.code if code is None else code
    return {"code": code, "message": error.message, "param": error.param, "line": number}
