"""Plots of a simulated run over time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.sim.report import RESOURCES
from weft.workload.plots import save


def plot_run(run: Mapping[str, Any], path: Path) -> Path:
    """Throughput, use of the machine, KV and queues of a simulated run over its time."""
    from matplotlib.figure import Figure

    line = run["timeline"]
    seconds = line["seconds"]
    figure = Figure(figsize=(10, 9), layout="constrained")
    tokens, use, kept = figure.subplots(3, 1, sharex=True)
    tokens.step(seconds, line["tokens_per_s"], where="post", label="computed")
    tokens.step(seconds, line["output_tokens_per_s"], where="post", label="generated")
    tokens.set(ylabel="tokens/s")
    for name, words in RESOURCES.items():
        if any(line[name]):
            use.step(seconds, line[name], where="post", label=words)
    use.set(ylabel="share", ylim=(0, 1.05))
    for name in ("running", "waiting"):
        kept.step(seconds, line[name], where="post", label=name)
    kept.set(ylabel="requests", xlabel="s")
    for axes in (tokens, use, kept):
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=7, frameon=False)
        axes.grid(alpha=0.3)
    figure.suptitle(f"{run['load']:g} {run['unit']}")
    return save(figure, path)
