"""Engines of families whose stages differ: KV groups that a stage lacks, inputs of each layer."""

from __future__ import annotations

import pytest
from checkpoints import CASES, build, prompt, save_with_tokenizer

from weft import LLM, SamplingParams

SETTINGS = {
    "dtype": "float32",
    "threads": 1,
    "kv_memory": "2MiB",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "max_model_len": 200,
}


@pytest.mark.parametrize(("name", "stages"), [("gemma3", 3), ("gemma4", 2), ("qwen3-moe-mixed", 2)])
def test_stages_give_the_tokens_of_one_process(name, stages, tmp_path) -> None:
    folder = str(save_with_tokenizer(build(name), tmp_path))
    assert CASES[name].max_model_len is None
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [prompt(count, count) for count in (70, 3, 40, 9, 26, 1)]
    with LLM.in_process(folder, **SETTINGS) as alone:
        expected = alone.generate(prompts, greedy, progress=False)
        whole = alone.served.kv_blocks
    with LLM.in_process(folder, **SETTINGS, pipeline_parallel=stages) as split:
        found = split.generate(prompts, greedy, progress=False)
        parts = split.served.kv_blocks
    assert [result.error for result in found] == [None] * len(prompts)
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    assert parts.keys() == whole.keys()
    assert all(parts[group] >= whole[group] for group in whole)
