"""Encodes a list of texts with sentence-transformers, once for each line that it reads.

    python drive_sentence_transformers.py FOLDER TEXTS.json THREADS

It writes a JSON line when the model is loaded, and one for each line of its input.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import sentence_transformers
import torch
import transformers

SHOWN = 8  # vectors that are given back


def main() -> None:
    folder, listed, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    texts = json.loads(Path(listed).read_text())
    model = sentence_transformers.SentenceTransformer(folder, device="cpu")
    versions = {
        "sentence-transformers": sentence_transformers.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    print(json.dumps(versions), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        vectors = model.encode(texts, show_progress_bar=False)
        seconds = time.perf_counter() - start
        first = vectors[:SHOWN].tolist()
        print(json.dumps({"seconds": seconds, "first": first}), flush=True)


if __name__ == "__main__":
    main()
