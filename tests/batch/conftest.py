"""Inputs of batches."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.batch.lines import InputFile

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def write(tmp_path) -> Callable[..., InputFile]:
    """Writes lines, texts as they are and all else as JSON, and opens them as an input."""

    def writing(*lines: Any, name: str = "in.jsonl") -> InputFile:
        path = tmp_path / name
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("".join(f"{text}\n" for text in texts))
        return InputFile(path)

    return writing
