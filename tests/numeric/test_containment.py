"""A failed request ends alone, by memory or logits: with drafts, grammars, embeddings."""

from __future__ import annotations

import errno
from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoints import build, prompt, save_with_tokenizer
from graphed import around_forward, use_graphs

from weft import LLM, SamplingParams
from weft.core.errors import OutOfMemoryError
from weft.core.memory import is_out_of_memory
from weft.engine.devices import pick_device
from weft.exec.device_rows import DeviceRows
from weft.exec.functions import StepFunctions

HUNGRY = 77  # a token that no forward pass has memory for
GOOD = [t for t in prompt(20, 1) * 2 if t != HUNGRY]
FREE = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
DRAFTS = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, speculation=6)
DIGITS = SamplingParams(temperature=0, max_tokens=30, grammar="start: /[0-9]{12}/")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_with_tokenizer(build("llama-gqa"), tmp_path_factory.mktemp("llama"))


def open_llm(folder, **more) -> LLM:
    settings = {"dtype": "float32", "threads": 1, "kv_memory": "4MiB", "max_num_seqs": 8}
    return LLM.in_process(folder, require_batch_invariance=True, **settings, **more)


def starve(monkeypatch, llm, when):
    def starving(ids, compute):
        if when(ids):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")
        return compute()

    around_forward(monkeypatch, llm.engine.built.executor, starving)


@pytest.mark.usefixtures("executor")
def test_a_hungry_request_of_any_kind_ends_alone(folder, monkeypatch):
    kinds = [FREE, DRAFTS, DIGITS]
    with open_llm(folder) as llm:
        expected = llm.generate([GOOD] * 3, kinds, progress=False)
        vector = llm.embed([GOOD])[0]
        assert not any(HUNGRY in result.token_ids for result in expected)
        starve(monkeypatch, llm, lambda ids: HUNGRY in ids.tolist())
        both = [kind for kind in kinds for _ in ("good", "bad")]
        results = llm.generate([GOOD, [HUNGRY, 5]] * 3, both, progress=False)
        with pytest.raises(OutOfMemoryError):
            llm.embed([[3, HUNGRY]])
        assert (llm.embed([GOOD])[0] == vector).all()
        llm.engine.built.scheduler.check()
    for wanted, good, bad in zip(expected, results[::2], results[1::2], strict=True):
        assert good.token_ids == wanted.token_ids
        assert good.finish_reason == wanted.finish_reason
        assert bad.error.code == "out_of_memory"
    assert expected[2].text.isdigit()


@pytest.mark.usefixtures("executor")
def test_drafts_are_never_to_blame(folder, monkeypatch):
    """Where memory is short for a step with drafts, its rows are computed without them."""
    one_token = {"logit_bias": {3: 50.0}}
    with open_llm(folder, prefix_caching=False) as llm:
        expected = llm.generate([GOOD] * 2, replace(FREE, **one_token), progress=False)
        drafted = []

        def too_many(ids):
            drafted.append(2 < len(ids) < len(GOOD))
            return drafted[-1]

        starve(monkeypatch, llm, too_many)
        results = llm.generate([GOOD] * 2, replace(DRAFTS, **one_token), progress=False)
    assert any(drafted)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]


@pytest.mark.usefixtures("executor")
def test_logits_that_are_not_finite_end_a_request_with_a_grammar_alone(folder, monkeypatch):
    """Before its first token and within its output."""
    later = replace(DIGITS, grammar="start: /(?s:.*)/", logit_bias={HUNGRY: 100.0})
    with open_llm(folder) as llm:
        expected = llm.generate([GOOD] * 2, [FREE, DIGITS], progress=False)

        def breaking(ids, compute):
            hidden = compute()  # [T, C]
            hidden[ids == HUNGRY] = np.nan
            return hidden

        around_forward(monkeypatch, llm.engine.built.executor, breaking)
        prompts = [GOOD, GOOD, [5, HUNGRY], GOOD]
        *good, first, second = llm.generate(prompts, [FREE, DIGITS, DIGITS, later], progress=False)
        llm.engine.built.scheduler.check()
    assert [r.token_ids for r in good] == [r.token_ids for r in expected]
    assert good[1].text.isdigit()
    assert (first.error.code, list(first.token_ids)) == ("non_finite_logits", [])
    assert (second.error.code, list(second.token_ids)) == ("non_finite_logits", [HUNGRY])


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("load_model", r"the weights \(.*KiB\); set quantize"),
        ("KVStore", r"KV \(4.00 MiB\); set kv_memory to less"),
        ("make_executor", "the buffers of steps; lower max_num_seqs"),
    ],
)
@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory."), OSError(errno.ENOMEM, "Cannot allocate")],
    ids=["device", "host"],
)
def test_what_finds_no_memory_at_the_start_is_told(part, words, error, folder, monkeypatch):
    def starving(*_, **__):
        raise error

    monkeypatch.setattr(f"weft.engine.build.{part}", starving)
    with pytest.raises(OutOfMemoryError, match=f"not enough memory for {words}"):
        open_llm(folder)


def test_other_errors_at_the_start_stay_what_they_are(folder, monkeypatch):
    def failing(*_, **__):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr("weft.engine.build.KVStore", failing)
    with pytest.raises(RuntimeError, match="illegal"):
        open_llm(folder)


def test_a_gpu_that_others_have_filled_is_told(monkeypatch):
    def full(_):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", full)
    with pytest.raises(OutOfMemoryError, match="a CUDA context on cuda:1; other processes"):
        pick_device("cuda", 1, 2)


def test_memory_that_is_short_at_the_start_is_told(folder, monkeypatch):
    def starving(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")

    use_graphs(monkeypatch)
    monkeypatch.setattr(StepFunctions, "forward", starving)
    with pytest.raises(OutOfMemoryError, match="for steps of 128 tokens; lower max_num_batched"):
        open_llm(folder, max_num_batched_tokens=100)


@pytest.mark.parametrize("prompt_tokens", [2, 40])
def test_a_request_whose_penalties_find_no_memory_ends_alone(prompt_tokens, folder, monkeypatch):
    """When its row is seated, before its first step; a long prompt samples nothing in that."""
    use_graphs(monkeypatch)
    count = DeviceRows._count
    starved = []

    def counting(self, row):
        if HUNGRY in self._table.tokens[row]:
            starved.append(row)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        count(self, row)

    kinds = [replace(kind, repetition_penalty=1.2, presence_penalty=0.5) for kind in (FREE, DRAFTS)]
    bad = [HUNGRY] + [5] * (prompt_tokens - 1)
    with open_llm(folder, max_num_batched_tokens=16) as llm:
        expected = llm.generate([GOOD] * 2, kinds, progress=False)
        assert not any(HUNGRY in result.token_ids for result in expected)
        monkeypatch.setattr(DeviceRows, "_count", counting)
        prompts, several = [GOOD, bad, GOOD, bad], [kind for kind in kinds for _ in range(2)]
        results = llm.generate(prompts, several, progress=False)
        llm.engine.built.scheduler.check()
    assert len(starved) == 2
    assert [r.token_ids for r in results[::2]] == [r.token_ids for r in expected]
    assert [r.error.code for r in results[1::2]] == ["out_of_memory"] * 2


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't "
                     "allocate memory: you tried to allocate 99 bytes."),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)  # fmt: skip
def test_errors_that_say_that_memory_ran_out(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448."),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        OSError(errno.ENOENT, "No such file or directory"),
        ValueError("out of memory"),
    ],
)
def test_errors_that_say_something_else(error):
    assert not is_out_of_memory(error)
