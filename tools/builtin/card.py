"""The model card, as data and as text made from that data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from builtin.evaluate import METHOD, Score

LICENCE = {"weights": "Apache-2.0", "data": "PSF-2.0", "heldout.txt": "PSF-2.0"}
TEMPLATE = Path(__file__).with_name("card.md")


def facts(
    *,
    shape: dict[str, Any],
    plan: dict[str, Any],
    corpus: dict[str, Any],
    run: dict[str, Any],
    scores: list[Score],
    files: dict[str, str],
) -> dict[str, Any]:
    """What `card.json` holds. The first score is the one to recompute."""
    first, *others = (s.as_dict() for s in scores)
    return {
        "name": "weft-builtin",
        "licence": LICENCE,
        "data": "Python standard library sources and language reference (pydoc_data.topics)",
        "architecture": "LlamaForCausalLM",
        "shape": shape,
        "corpus": corpus,
        "training": plan,
        "run": run,
        "heldout": {**first, "method": METHOD},
        "heldout_other_windows": others,
        "sha256": files,
    }


def text(card: dict[str, Any]) -> str:
    """The README made from what `facts` returned."""
    shape, plan, corpus, run = (card[k] for k in ("shape", "training", "corpus", "run"))
    other = card["heldout_other_windows"][0]
    per_layer = shape["hidden"] * (
        2 * (shape["heads"] + shape["kv_heads"]) * shape["head_dim"] + 3 * shape["intermediate"] + 2
    )
    parameters = shape["hidden"] * (shape["vocab"] + 1) + shape["layers"] * per_layer
    pass_tokens = corpus["document_tokens"] / (1 - plan["chat_share"])
    return TEMPLATE.read_text(encoding="utf-8").format(
        **{**shape, **plan, **run, **card["heldout"]},
        parameters=parameters / 1e6,
        weight_megabytes=2 * parameters / 1e6,
        long_percent=100 * plan["long_share"],
        chat_percent=100 * plan["chat_share"],
        million_tokens=plan["tokens"] / 1e6,
        passes=plan["tokens"] / pass_tokens,
        remark=f" ({run['note']})" if run["note"] else "",
        minutes=run["wall_s"] / 60,
        python=corpus["python"],
        documents=corpus["documents"],
        megabytes=corpus["document_bytes"] / 1e6,
        modules=", ".join(f"`{m}`" for m in corpus["heldout_modules"]),
        topics=", ".join(f"`{t}`" for t in corpus["heldout_topics"]),
        repeated=corpus["heldout_lines_also_in_training"],
        other_window=other["window"],
        other_perplexity=other["perplexity"],
    )
