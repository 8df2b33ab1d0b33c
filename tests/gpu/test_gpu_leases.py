"""Steps that are replayed under leases give the tokens of planned ones, with the kernels of GPUs.

These are interpreted where there is no GPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from checkpoints import build, prompt, save_with_tokenizer
from served import opened, serve

from depth import deep_on_cpu
from weft.core.types import SamplingParams
from weft.exec import replayed
from weft.kernels.triton import advance

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, seed=0)
ASKED = [
    replace(GREEDY, temperature=0.9, seed=4, repetition_penalty=1.3, presence_penalty=0.4),
    replace(GREEDY, max_tokens=5, stop_token_ids=tuple(range(0, 190, 25))),
]


@pytest.mark.parametrize(
    ("family", "graphs"),
    [
        ("llama-gqa", False),
        pytest.param("llama-gqa", True, marks=deep_on_cpu),
        pytest.param("gemma4-shared-kv", True, marks=deep_on_cpu),
        pytest.param("youtu-one-query-matrix", True, marks=deep_on_cpu),
    ],
)
def test_replayed_steps_change_no_token(family, graphs, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(replayed, "UNPUBLISHED_S", 60.0)  # interpreted steps are long
    folder = save_with_tokenizer(build(family), tmp_path)
    prompts = [prompt(3 + number, number) for number in range(len(ASKED))]
    found = {}
    for resident in ("off", "on"):
        settings = {"kernels": "triton", "graphs": graphs, "resident": resident}
        with opened(folder, **settings) as engine:
            assert engine.executor._decoder.ops.advance is advance.advance
            found[resident] = serve(engine, prompts, ASKED)
            steps = engine.scheduler.totals.resident_steps
            assert steps > 1 if resident == "on" else steps == 0
    assert [a.tokens for a in found["on"]] == [a.tokens for a in found["off"]]
    assert all(answer.error is None for answer in found["on"])
