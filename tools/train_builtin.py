"""Build weft's built-in model from the running Python's standard library.

    python tools/train_builtin.py --out src/weft/builtin            # corpus, tokenizer, training
    python tools/train_builtin.py --out src/weft/builtin --check    # card against weights

Needs torch, tokenizers and safetensors. Takes about half an hour on two CPU cores with bf16
instructions. `heldout.txt` is written once and kept: it is the yardstick across Python versions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from builtin import card, chat, corpus, evaluate, model, train, vocabulary

DEFAULT_STEPS = 1400
MAX_WEIGHT_BYTES = 12_000_000
CHECK_TOLERANCE = 0.02  # of the perplexity, between two trainings
CHECKPOINT_EVERY_S = 180.0


@dataclass(frozen=True)
class Data:
    """Everything the model learns from, encoded, and what it is measured on."""

    tokenizer: Tokenizer
    plain: list[list[int]]
    chat: list[list[int]]
    facts: dict[str, Any]  # for the card


def heldout(out: Path) -> str:
    """The held-out text of `out`, made from this Python if the folder has none yet."""
    path = out / "heldout.txt"
    if not path.exists():
        path.write_text(corpus.heldout_text(), encoding="utf-8", newline="\n")
        (out / "heldout.LICENSE.txt").write_text(corpus.licence_text(), encoding="utf-8")
    return path.read_bytes().decode()


def prepare(out: Path, shape: model.Shape, seed: int) -> Data:
    """Collect the corpus, train the tokenizer on it and encode it."""
    documents = corpus.training_documents()
    chats = chat.chats(documents, seed)
    texts = [d.text for d in documents]
    tokenizer = vocabulary.train_tokenizer(texts, shape.vocab)
    bos, eos = (vocabulary.token_id(tokenizer, t) for t in (vocabulary.BOS, vocabulary.EOS))
    plain = [[bos, *ids, eos] for ids in vocabulary.encode_plain(tokenizer, texts)]
    chat_texts = [vocabulary.chat_text(c) for c in chats]
    encoded = tokenizer.encode_batch(chat_texts, add_special_tokens=False)
    talk = [[bos, *e.ids, eos] for e in encoded]
    facts = {
        "python": platform.python_version(),
        "documents": len(documents),
        "document_bytes": sum(len(t.encode()) for t in texts),
        "document_tokens": sum(map(len, plain)),
        "chats": len(chats),
        "chat_tokens": sum(map(len, talk)),
        "sha256": corpus.digest(documents),
        "heldout_modules": list(corpus.HELDOUT_MODULES),
        "heldout_topics": list(corpus.HELDOUT_TOPICS),
        "heldout_lines_also_in_training": round(corpus.repeated_share(heldout(out), documents), 4),
    }
    return Data(tokenizer, plain, talk, facts)


def write_settings(out: Path, shape: model.Shape, tokenizer: Tokenizer) -> None:
    """Write all files of the model folder that do not depend on the training."""
    bos, eos, pad = (vocabulary.token_id(tokenizer, t) for t in vocabulary.SPECIAL[:3])
    tokenizer.save(str(out / "tokenizer.json"))
    vocabulary.write_json(out / "config.json", model.hf_config(shape, bos, eos, pad))
    vocabulary.write_json(
        out / "tokenizer_config.json", vocabulary.tokenizer_config(shape.max_positions)
    )
    vocabulary.write_json(out / "generation_config.json", vocabulary.generation_config(tokenizer))


def measure(folder: Path, window: int = evaluate.WINDOW) -> evaluate.Score:
    """Score the model in `folder` on the held-out text beside it."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = heldout(folder)
    ids = vocabulary.encode_plain(tokenizer, [text])[0]
    bos = vocabulary.token_id(tokenizer, vocabulary.BOS)
    return evaluate.score(model.load(folder), ids, len(text.encode()), bos, window)


class Saver:
    """Saves a checkpoint every few minutes, if it was given a folder."""

    def __init__(self, decoder: model.Llama, folder: Path | None) -> None:
        self.decoder = decoder
        self.folder = folder
        self.last = time.monotonic()

    def __call__(self) -> None:
        if self.folder is None or time.monotonic() - self.last < CHECKPOINT_EVERY_S:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        model.save(self.decoder, self.folder / "model.safetensors")
        self.last = time.monotonic()


def build(args: argparse.Namespace) -> None:
    """The whole way from the standard library to a finished model folder."""
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    shape, plan = model.Shape(), train.Plan(steps=args.steps, seed=args.seed)
    data = prepare(out, shape, args.seed)
    write_settings(out, shape, data.tokenizer)
    print(f"corpus and tokenizer: {time.monotonic() - started:.0f} s  {data.facts}", flush=True)

    trainer = train.Trainer(shape, plan)
    stream = train.Stream(data.plain, data.chat, plan)
    train.run(trainer, stream, Saver(trainer.model, args.checkpoints))
    trained_s = time.monotonic() - started
    weights = out / "model.safetensors"
    model.save(trainer.model, weights)
    assert weights.stat().st_size <= MAX_WEIGHT_BYTES

    scores = [measure(out), measure(out, 2 * evaluate.WINDOW + 1)]
    facts = card.facts(
        shape=asdict(shape),
        plan={**asdict(plan), "tokens": plan.tokens, "epochs": stream.epochs},
        corpus=data.facts,
        run={
            "wall_s": round(trained_s, 1),
            "threads": args.threads,
            "torch": torch.__version__,
            "note": args.note,
        },
        scores=scores,
        files={n: sha256(out / n) for n in ("model.safetensors", "tokenizer.json", "heldout.txt")},
    )
    vocabulary.write_json(out / "card.json", facts)
    (out / "README.md").write_text(card.text(facts), encoding="utf-8")
    print(f"{weights.stat().st_size} bytes, {trained_s / 60:.1f} min, {scores[0]}")


def sha256(path: Path) -> str:
    """The file's digest in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check(folder: Path, other_card: Path | None) -> int:
    """Compare the folder with its card, or only its perplexity with another; 0 if they agree."""
    facts = json.loads((other_card or folder / "card.json").read_text())
    digests = {} if other_card else facts["sha256"]
    wrong = [n for n, digest in digests.items() if sha256(folder / n) != digest]
    expected = facts["heldout"]["perplexity"]
    found = measure(folder).perplexity
    off = abs(found / expected - 1)
    print(f"perplexity {found:.4f}, card {expected:.4f} ({off:.2%} off); changed files: {wrong}")
    return int(off > CHECK_TOLERANCE or bool(wrong))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="model folder")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--note", default="", help="remark on the run, for the card")
    parser.add_argument("--checkpoints", type=Path, help="folder for weights on the way")
    parser.add_argument("--check", action="store_true", help="only compare --out with its card")
    parser.add_argument("--card", type=Path, help="with --check: another training's card.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.check:
        return check(args.out, args.card)
    build(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
