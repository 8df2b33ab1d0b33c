"""The tables of a run, in Markdown: every figure, and the goals with what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from goals import GOALS, Goal
from journal import STAND_IN
from running import Outcome

ENDED = ("passed", "done before")  # as a part should


def shown(value: float | str, unit: str = "") -> str:
    """A value as the tables show it."""
    text = f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1000 else str(value)
    if isinstance(value, float) and abs(value) >= 1000:
        text = f"{value:,.0f}"
    return text if value == STAND_IN or not unit else f"{text} {unit}"


def verdict(figure: dict[str, Any], gpu: str) -> str:
    """How a figure stands to its goal; one for another GPU is neither reached nor missed."""
    if figure.get("goal") is None:
        return ""
    goal = Goal("", "", figure["goal"], figure.get("better", "less"), gpu=figure.get("gpu", ""))
    return _verdict(goal, figure["value"], gpu)


def _verdict(goal: Goal, value: float | str, gpu: str) -> str:
    if goal.gpu and goal.gpu not in gpu:
        return f"{goal} on an {goal.gpu}"
    if isinstance(value, str):
        return str(goal)
    return f"{'reached' if goal.reached(value) else 'MISSED'} ({goal})"


def of_figures(outcomes: Sequence[Outcome], gpu: str) -> str:
    """Parts, their figures and their remarks."""
    rows = ["| part | figure | value | goal |", "|---|---|---|---|"]
    for outcome in outcomes:
        status = f"{outcome.status}{f': {outcome.why}' if outcome.why else ''}"
        rows.append(f"| **{outcome.name}** | {_cell(status)} | {outcome.seconds:.0f} s | |")
        for figure in outcome.figures:
            value = shown(figure["value"], figure.get("unit", ""))
            cells = (figure["name"], value, verdict(figure, gpu))
            rows.append("| | " + " | ".join(map(_cell, cells)) + " |")
        rows += [f"| | {_cell(note)} | | |" for note in outcome.notes]
    return "\n".join(rows)


def of_goals(outcomes: Sequence[Outcome], gpu: str, *, dry: bool = False) -> str:
    """Each goal with what was measured: of several figures the one that is farthest from it.

    Args:
        dry: all of it was a stand-in, which has none of these figures.
    """
    by_name = {outcome.name: outcome for outcome in outcomes}
    rows = ["| goal | bound | measured | |", "|---|---|---|---|"]
    for goal in GOALS:
        outcome = by_name.get(goal.part)
        name = _cell(goal.name.replace("[0-9]", ""))
        bound = f"{goal} on an {goal.gpu}" if goal.gpu else str(goal)
        found = [] if outcome is None else _matching(outcome, goal)
        if not found:
            ended = outcome is not None and outcome.status in ENDED
            cells = (STAND_IN, "") if dry and ended else ("not measured", _cell(_why(outcome)))
            rows.append(f"| {name} | {bound} | {cells[0]} | {cells[1]} |")
            continue
        numbers = [value for value in found if not isinstance(value, str)]
        worst = found[0]
        if numbers:
            worst = min(numbers) if goal.better == "more" else max(numbers)
        word = _verdict(goal, worst, gpu).split(" ")[0] if numbers else ""
        word = word if word in ("reached", "MISSED") else ""
        many = f", the worst of {len(found)}" if len(found) > 1 else ""
        rows.append(f"| {name} | {bound} | {shown(worst)}{many} | {word} |")
    return "\n".join(rows)


def of_parts(outcomes: Sequence[Outcome]) -> str:
    """Which parts did not pass, why, and their last words."""
    told = []
    for outcome in outcomes:
        if outcome.status in ENDED:
            continue
        told.append(f"{outcome.name}: {outcome.status}{f' ({outcome.why})' if outcome.why else ''}")
        told += [f"  {line}" for line in outcome.last_lines]
    return "\n".join(told)


def _matching(outcome: Outcome, goal: Goal) -> list[float | str]:
    return [each["value"] for each in outcome.figures if fnmatchcase(each["name"], goal.name)]


def _why(outcome: Outcome | None) -> str:
    if outcome is None:
        return "the part was not asked for"
    if outcome.status in ENDED:
        return f"not among the figures of '{outcome.name}'"
    return f"{outcome.name}: {outcome.why or outcome.status}"


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
