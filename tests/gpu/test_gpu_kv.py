"""Every family with the kernels of GPUs and KV of every type, against plain torch with that KV."""

from __future__ import annotations

import pytest
from checkpoints import FAMILY_CASES, build, prompt, save
from served import Truth, opened, serve, told

from depth import deep_on_cpu
from weft.core.types import SamplingParams
from weft.models.families import FAMILIES

SCORED = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, seed=0, prompt_logprobs=0)
PROMPTS = [prompt(19, 1), prompt(7, 2)]  # in chunks, beside each other
TOLERANCE = 5e-4  # of float32 logits
BETWEEN_CODES = 0.3  # of what 8 bits lose: a number between two codes may go to either
PAIRS = [
    (family, kv)
    for family, row in FAMILIES.items()
    for kv in ("auto", "fp8", "int8")
    if kv not in row.unsound_kv and family in FAMILY_CASES
]


@deep_on_cpu
@pytest.mark.parametrize(("family", "kv_dtype"), PAIRS)
def test_logits_are_those_of_plain_torch_with_the_same_kv(family, kv_dtype, tmp_path) -> None:
    folder = save(build(FAMILY_CASES[family]), tmp_path / family)
    exact = Truth(folder)
    settings = {"kv_dtype": kv_dtype, "max_num_batched_tokens": 8, "graphs": False}
    answers = []
    for kernels, device in (("reference", {"device": "cpu"}), ("triton", {})):
        with opened(folder, kernels=kernels, **device, **settings) as engine:
            answers.append(serve(engine, PROMPTS, [SCORED] * len(PROMPTS)))
    for tokens, truth, answer in zip(PROMPTS, *answers, strict=True):
        assert answer.error is None
        lost = exact.gap(tokens, truth)
        assert (lost > TOLERANCE) == (kv_dtype != "auto")
        most = TOLERANCE if kv_dtype == "auto" else BETWEEN_CODES * lost
        assert float((told(answer) - told(truth)).abs().max()) < most
