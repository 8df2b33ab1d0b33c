"""The report of ``weft profile`` for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.cost.fit import Accuracy, ProfileKey
from weft.cost.interference import LEAST_GAIN
from weft.cost.profiler import GOAL
from weft.cost.steps import LONG_S


def format_report(report: Mapping[str, Any], key: ProfileKey) -> str:
    """The report in a few lines, with the goal of OmniServe's table 2; the host tier's follows."""
    lines = [
        f"{key.model} in {key.dtype} on {key.hardware} ({key.parallelism})",
        f"{report['fitted_steps']} steps fitted, {report['knots']} knots, "
        f"medians of {report['repeats']} or more, fewer of steps over {LONG_S:g} s",
        "",
        f"{'':24}{'average':>9}{'P90':>9}",
    ]
    for name, text in (
        ("held_out", "accuracy, held out"),
        ("fitted", "accuracy, fitted to"),
        ("repeatability", "machine repeats itself"),
    ):
        lines.append(f"{text:24}{report[name]['average']:>9.1%}{report[name]['p90']:>9.1%}")
    lines.append(f"{'goal':24}{GOAL.average:>9.1%}{GOAL.p90:>9.1%}")
    met = all(got >= goal for got, goal in zip(report["held_out"].values(), GOAL, strict=True))
    lines += ["", f"the goal is {'met' if met else 'NOT met'} on held-out steps"]
    if report["repeatability"]["p90"] < GOAL.p90:
        lines.append("the machine repeats itself worse than that; measure again when it is quiet")
    if "host" in report:
        lines += ["", *_host_lines(report["host"])]
    if "interference" in report:
        lines += ["", *_interference_lines(report["interference"])]
    return "\n".join(lines)


def _interference_lines(report: Mapping[str, Any]) -> list[str]:
    """What was measured of steps in halves, or why nothing was."""
    if "problem" in report:
        return [report["problem"]]
    lines = [
        "dense layers of a half beside decode attention of the other, as shares of their speeds",
        f"{'programs of attention':24}{'dense':>9}{'attention':>11}{'alone':>9}"
        f"{'held out':>10}{'best gain':>11}{'saved':>8}",
    ]
    for row in report["limits"]:
        name = f"at most {row['programs']}" if row["programs"] else "any number"
        lines.append(
            f"{name:24}{row['dense']:>9.1%}{row['attention']:>11.1%}{row['alone']:>9.1%}"
            f"{row['held_out']['average']:>10.1%}{row['gain'] - 1:>+11.1%}{row['saved']:>8.1%}"
        )
    chosen = f"{report['chosen']} programs" if report["chosen"] else "any number of programs"
    gain = report["gain"]
    serves = "are split where that gains" if gain > LEAST_GAIN else "run whole"
    lines.append(f"steps {serves}: with {chosen} they take {1 - 1 / gain:.1%} less at the most")
    return lines


def _host_lines(report: Mapping[str, Any]) -> list[str]:
    """What was measured of the host tier."""
    lines = [f"host tier: {report['name']}", *_cost_lines(report), ""]
    lines += [f"{'':32}{'average':>9}{'P90':>9}", *_accuracy_lines("moves", report["moves"])]
    carried, overlapped = report.get("carried"), report.get("overlapped")
    if carried is not None:
        lines += _accuracy_lines("steps with host rows", carried)
        if report["round_trip"]:
            lines += _accuracy_lines("round trips", report["round_trip"])
    if overlapped is not None:
        for name, what in (("one", "one sub-batch"), ("two", "two sub-batches")):
            if name in overlapped:
                lines += _accuracy_lines(what, overlapped[name])
    kinds = {"steps with host rows": carried, "overlapped sub-batches": overlapped}
    measured = {what: kind for what, kind in kinds.items() if kind is not None}
    if measured:
        lines += [_row("goal", GOAL._asdict()), "", *map(_verdict, measured, measured.values())]
    if any(kind["repeatability"]["p90"] < GOAL.p90 for kind in measured.values()):
        lines.append("the machine repeats itself worse; measure again when it is quiet")
    return lines


def _cost_lines(report: Mapping[str, Any]) -> list[str]:
    """The costs that were fitted."""
    lines = []
    for way, words in (("out", "to the host"), ("back", "to the device")):
        rate = report[way]["bytes_per_s"]
        speed = f"{rate / 1e9:.2f} GB/s" if rate else "no measurable time a token"
        lines.append(f"moves {words}: {speed}, {report[way]['move_s'] * 1e6:.0f} us each")
    lines.append(f"computing waits for {report['stall']:.0%} of a move")
    if "carried" in report:
        step_us, row_us = (report["carry"][name] * 1e6 for name in ("step_s", "row_layer_s"))
        lines.append(f"carried rows: {step_us:.0f} us a step, {row_us:.2f} us a row and layer")
        step_us, row_us = (report["wake"][name] * 1e6 for name in ("step_s", "row_s"))
        lines.append(f"round trips beside attention: {step_us:.0f} us, {row_us:.1f} us a row")
    if "overlapped" in report:
        cost = {name: value * 1e6 for name, value in report["overlapped"]["cost"].items()}
        lines += [
            f"overlapped sub-batches: {cost['batch_s']:.0f} us each, {cost['row_s']:.1f} us a row, "
            f"{cost['second_s']:.0f} us for a second one,",
            f"  {cost['wait_s']:.0f} us of waits, and {cost['drag'] / 1e6:.0%} of the attention "
            "beside them",
        ]
    return lines


def _verdict(what: str, of: Mapping[str, Mapping[str, float]]) -> str:
    met = all(got >= goal for got, goal in zip(of["held_out"].values(), GOAL, strict=True))
    return f"the goal is {'met' if met else 'NOT met'} on held-out {what}"


def _accuracy_lines(what: str, of: Mapping[str, Mapping[str, float]]) -> list[str]:
    return [
        _row(f"{what}, held out", of["held_out"]),
        _row("  the machine repeats itself", of["repeatability"]),
    ]


def _row(text: str, of: Mapping[str, float]) -> str:
    found = Accuracy(of["average"], of["p90"])
    return f"{text:32}{found.average:>9.1%}{found.p90:>9.1%}"
