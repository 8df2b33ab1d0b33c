"""A local task for lm-eval, and its log-likelihoods as transformers computes them.

Half of the continuations are the held-out text's own, half are what the model itself would say, so
that lm-eval's second answer, whether a continuation is the greedy one, is checked too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NAME = "weft_local"
TASK = f"""task: {NAME}
dataset_path: json
dataset_kwargs:
  data_files: {{test: items.json}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{continuation}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
ITEMS = 40
GREEDY_TOKENS = 6


class Reference:
    """The same checkpoint in transformers, float32."""

    def __init__(self, model_folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(model_folder)
        self._model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def scores(self, ids: list[int]) -> Any:
        """Log probabilities [position, token]."""
        with self._torch.no_grad():
            logits = self._model(self._torch.tensor([ids])).logits[0]
        return self._torch.log_softmax(logits.float(), -1)

    def continued(self, text: str) -> str:
        """What the model would say next."""
        ids = self.ids(text)
        for _ in range(GREEDY_TOKENS):
            ids.append(int(self.scores(ids)[-1].argmax()))
        return str(self._tokenizer.decode(ids[-GREEDY_TOKENS:]))

    def judge(self, context: str, continuation: str) -> tuple[float, bool]:
        """Log-likelihood of a continuation, and whether it is the greedy one."""
        whole, start = self.ids(context + continuation), len(self.ids(context))
        scores = self.scores(whole)
        places = range(start, len(whole))
        total = sum(float(scores[i - 1, whole[i]]) for i in places)
        return total, all(int(scores[i - 1].argmax()) == whole[i] for i in places)


def write(folder: Path, model_folder: Path) -> None:
    """Write task and items."""
    reference = Reference(model_folder)
    text = (model_folder / "heldout.txt").read_text()
    items: list[dict[str, str]] = []
    for part in text.split("\n\n"):
        at = part.find(" ", len(part) // 2)
        if not 80 < len(part) < 1500 or at < 0 or part[:at] != part[:at].rstrip():
            continue
        greedy = len(items) % 2 == 1
        context = part[:at]
        continuation = reference.continued(context) if greedy else part[at:]
        items.append({"context": context, "continuation": continuation})
        if len(items) == ITEMS:
            break
    (folder / "items.json").write_text(json.dumps(items))
    (folder / f"{NAME}.yaml").write_text(TASK)


def compare(folder: Path, model_folder: Path) -> dict[str, Any]:
    """Hold what lm-eval logged against transformers."""
    reference = Reference(model_folder)
    (log,) = folder.rglob(f"samples_{NAME}_*.jsonl")
    differences, disagreements, greedy = [], 0, 0
    for line in log.read_text().splitlines():
        sample = json.loads(line)
        asked = sample["arguments"]["gen_args_0"]
        likelihood, is_greedy = reference.judge(asked["arg_0"], asked["arg_1"])
        told, told_greedy = sample["resps"][0][0]
        differences.append(abs(likelihood - float(told)))
        disagreements += is_greedy != (told_greedy == "True")
        greedy += is_greedy
    return {
        "items": len(differences),
        "worst_difference": max(differences),
        "greedy_items": greedy,
        "greedy_disagreements": disagreements,
    }
