"""weft: an LLM serving engine that weaves interactive, best-effort and offline traffic."""

from __future__ import annotations

TYPE_CHECKING = False  # of typing, whose import takes so long that Ctrl-C may come in it
__version__ = "0.1.0"

if TYPE_CHECKING:
    from typing import Any

    from weft.core.types import SamplingParams
    from weft.engine.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Load the public classes on first use, so that ``import weft`` stays fast and torch-free."""
    if name == "LLM":
        from weft.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from weft.core.types import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'weft' has no attribute '{name}'")
