"""Results that depend on the sequence alone: the same bits in any batch and any chunks."""

from __future__ import annotations

import pytest
import torch
from checkpoints import build, prompt, save
from paged import PagedRunner, run_chunks

from weft import LLM, SamplingParams
from weft.core.errors import KernelError
from weft.kernels.cpu import attention
from weft.kernels.ops import select_ops
from weft.models.hub import resolve_model
from weft.models.loader import load_model

DTYPES = ["float32", "bfloat16"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {"builtin": resolve_model("builtin")}
    for name in FAMILIES[1:]:
        made[name] = save(build(name), tmp_path_factory.mktemp(name))
    return made


def decoder(folder, dtype, kernels="auto"):
    ops = select_ops("cpu", dtype, kernels)
    return load_model(folder, dtype=dtype, max_model_len=256, ops=ops)


FAMILIES = ["builtin", "gemma3", "qwen3-moe", "gemma4-shared-kv", "gemma4-moe-key-is-value"]


CASES = [(family, dtype, 1) for family in FAMILIES for dtype in DTYPES]


@pytest.mark.parametrize(("family", "dtype", "threads"), [*CASES, ("builtin", "bfloat16", 2)])
def test_logits_are_the_same_bits_in_any_batch_and_any_chunks(folders, family, dtype, threads):
    torch.set_num_threads(threads)
    attention.set_threads(threads)
    model = decoder(folders[family], dtype)
    tokens = prompt(90, 3)
    whole = PagedRunner(model).step([("a", tokens)])[0]  # [n, V]
    for chunk in (1, 7, 64):
        assert torch.equal(run_chunks(PagedRunner(model), "a", tokens, chunk), whole)
    for others in (*range(1, 8), 13, 31, 39) if threads == 1 else (1, 7, 39):
        runner = PagedRunner(model, blocks=6 + 2 * others)
        company = [(f"b{i}", prompt(1 + i % 5, i)) for i in range(others)]
        first = runner.step([*company, ("a", tokens[:80])])[-1]
        assert torch.equal(first, whole[:80])
        for position in range(80, 84):
            last = [("a", [tokens[position]]), *((f"b{i}", [i]) for i in range(others))]
            assert torch.equal(runner.step(last)[0], whole[position : position + 1])


def gap(model, tokens, chunk, whole):
    return float((run_chunks(PagedRunner(model), "a", tokens, chunk) - whole).abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_it_a_continued_stream_stays_within_the_gap_of_another_chunking(folders, dtype):
    """What is computed again after a crash is a prompt that once was single tokens.

    The gap is of rounding: some steps of the dtype at the size of the logits.
    """
    model = decoder(folders["gemma3"], dtype, "reference")
    tokens = prompt(90, 3)
    undisturbed = run_chunks(PagedRunner(model), "a", tokens, 1)
    largest = float(undisturbed.abs().max())
    chunkings = [gap(model, tokens, chunk, undisturbed) for chunk in (2, 3, 7, 16, 64)]
    recovered = PagedRunner(model)
    again = recovered.step([("a", tokens[:60])])[0]  # prompt and what was published
    rest = torch.cat([recovered.step([("a", [token])])[0] for token in tokens[60:]])
    error = float((torch.cat((again, rest)) - undisturbed).abs().max())
    assert error <= max(*chunkings, 8 * torch.finfo(getattr(torch, dtype)).eps * largest)
    assert max(chunkings) <= 64 * torch.finfo(getattr(torch, dtype)).eps * largest


def test_the_reference_kernels_are_refused_where_invariance_is_wanted():
    with pytest.raises(KernelError, match="kernels='cpu'"):
        LLM.in_process("builtin", kernels="reference", require_batch_invariance=True)


@pytest.mark.parametrize(
    "more",
    [
        {"frequency_penalty": 0.5},
        {"allowed_token_ids": tuple(range(200, 400)), "bad_token_sequences": ((250, 251), (300,))},
    ],
)
def test_tokens_and_log_probabilities_of_the_engine_are_the_same_in_any_company(more):
    """Seeded draws, penalties and restrictions included."""
    params = SamplingParams(
        temperature=1.0, seed=5, max_tokens=20, logprobs=3, ignore_eos=True, **more
    )
    settings = {"threads": 1, "kv_memory": "16MiB", "max_model_len": 256}
    tokens, crowd = prompt(70, 1), [prompt(3 + 5 * i, i) for i in range(2, 10)]
    seen = []
    for chunk, company in ((256, []), (11, []), (16, crowd)):
        with LLM.in_process(
            "builtin", max_num_batched_tokens=chunk, max_num_seqs=10, **settings
        ) as engine:
            assert engine.engine.built.model.ops.batch_invariant
            result = engine.generate([*company, tokens], params, progress=False)[-1]
        seen.append((result.token_ids, result.logprobs))
    assert seen[0] == seen[1] == seen[2]
