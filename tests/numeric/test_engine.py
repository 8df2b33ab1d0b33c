"""The whole engine, from prompt to tokens, against Hugging Face and against itself."""

from __future__ import annotations

import asyncio
import gc
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import build, likeliest_by_reference, prompt, save_with_tokenizer
from graphed import around_forward
from safetensors.torch import load_file, save_file

from weft import LLM, SamplingParams
from weft.core.errors import ParameterError, PromptTooLongError

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
FAMILIES = ["llama-gqa", "mistral-window", "gemma3"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A checkpoint of each family with the built-in model's tokenizer beside it."""
    return {
        name: save_with_tokenizer(build(name), tmp_path_factory.mktemp(name)) for name in FAMILIES
    }


def llm(folder: Path, **settings) -> LLM:
    defaults = {"dtype": "float32", "threads": 1, "kv_memory": "4MiB", "max_num_seqs": 8}
    return LLM.in_process(folder, **{**defaults, "max_num_batched_tokens": 64, **settings})


PROMPTS = [prompt(90, 1), prompt(7, 2), prompt(90, 1)[:70] + prompt(5, 3), prompt(33, 4), [5]]


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("executor", "depth", "kernels"),
    [
        ("eager", 0, "cpu"),
        ("eager", 1, "cpu"),
        ("eager", 0, "reference"),
        ("eager", 1, "reference"),
        ("graphs", 0, "cpu"),
        ("graphs", 1, "reference"),
    ],
    indirect=["executor"],
)
def test_greedy_tokens_equal_the_reference(folders, family, depth, kernels):
    model = build(family)
    with llm(folders[family], steps_in_flight=depth, kernels=kernels) as engine:
        results = engine.generate(PROMPTS, GREEDY, progress=False)
    for tokens, result in zip(PROMPTS, results, strict=True):
        assert len(result.token_ids) == 24
        assert result.token_ids == likeliest_by_reference(model, tokens, result.token_ids)
        assert result.finish_reason == "length"


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pool_that_is_too_small_for_all_changes_no_token(folders, family):
    """Answers are longer than what admission leaves room for."""
    long = replace(GREEDY, max_tokens=64)
    with llm(folders[family]) as roomy:
        expected = roomy.generate(PROMPTS, long, progress=False)
        bytes_per_token = sum(g.bytes_per_token for g in roomy.engine.built.model.facts.groups)
    with llm(folders[family], kv_memory=176 * bytes_per_token, max_model_len=160) as tight:
        results = tight.generate(PROMPTS, long, progress=False)
        assert tight.engine.built.scheduler.totals.preemptions > 0
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]


def test_a_length_below_the_window_makes_every_layer_full(folders):
    """The spec is read with the length served, also when memory decides that length."""
    model, tokens = build("gemma3"), PROMPTS[1]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    with llm(folders["gemma3"]) as engine:
        window = min(g.window for g in engine.engine.built.model.facts.groups if g.window)
        assert window > 16
        cost = sum(g.bytes_per_token for g in engine.engine.built.model.facts.groups)
        expected = engine.generate([tokens], params, progress=False)[0].token_ids
    assert len(expected) == 9
    assert expected == likeliest_by_reference(model, tokens, expected)
    with llm(folders["gemma3"], kv_memory=16 * cost) as by_memory:
        assert by_memory.engine.built.resolved.max_model_len == 16
        assert by_memory.generate([tokens], params, progress=False)[0].token_ids == expected
    with llm(folders["gemma3"], max_model_len=16) as by_setting:
        assert by_setting.generate([tokens], params, progress=False)[0].token_ids == expected


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_prefix_cache_changes_no_token_and_is_reported(folders, family):
    with llm(folders[family], prefix_caching=False) as plain:
        expected = plain.generate([PROMPTS[0]], GREEDY, progress=False)[0]
    with llm(folders[family]) as engine:
        first = engine.generate([PROMPTS[0]], GREEDY, progress=False)[0]
        second = engine.generate([PROMPTS[0]], GREEDY, progress=False)[0]
        other = engine.generate([PROMPTS[2]], GREEDY, progress=False)[0]
    assert first.cached_tokens == 0
    assert second.cached_tokens == 80
    assert other.cached_tokens == 64
    assert first.token_ids == second.token_ids == expected.token_ids


@pytest.mark.usefixtures("executor")
def test_the_same_seed_gives_the_same_tokens_in_any_company(folders):
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=20, ignore_eos=True)
    with llm(folders["llama-gqa"]) as engine:
        alone = engine.generate([PROMPTS[3]], params, progress=False)[0]
        crowd = [PROMPTS[0], PROMPTS[3], PROMPTS[1]]
        company = engine.generate(crowd, params, progress=False)[1]
        other = engine.generate(
            [PROMPTS[3]], SamplingParams(temperature=1.0, seed=12, max_tokens=20), progress=False
        )[0]
    assert alone.token_ids == company.token_ids
    assert alone.token_ids != other.token_ids


@pytest.mark.usefixtures("executor")
def test_logprobs_equal_the_reference(folders):
    model, tokens = build("llama-gqa"), PROMPTS[3]
    params = SamplingParams(
        temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=2, ignore_eos=True
    )
    with llm(folders["llama-gqa"], max_num_seqs=4, max_num_batched_tokens=10) as engine:
        result = engine.generate([tokens], params, progress=False)[0]
    whole = tokens + result.token_ids
    with torch.no_grad():
        expected = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    assert len(result.logprobs) == 5
    for i, entry in enumerate(result.logprobs):
        row = expected[len(tokens) + i - 1]
        assert entry.token == result.token_ids[i]
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
        assert [t for t, _ in entry.top] == row.topk(3).indices.tolist()
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == len(tokens)
    for i, entry in enumerate(result.prompt_logprobs[1:], 1):
        assert entry.token == tokens[i]
        assert entry.logprob == pytest.approx(float(expected[i - 1, tokens[i]]), abs=1e-4)


@pytest.mark.usefixtures("executor")
def test_prompt_logprobs_survive_preemption(folders):
    params = SamplingParams(temperature=0, max_tokens=24, prompt_logprobs=0, ignore_eos=True)
    with llm(folders["llama-gqa"]) as roomy:
        expected = roomy.generate(PROMPTS, params, progress=False)
        bytes_per_token = sum(g.bytes_per_token for g in roomy.engine.built.model.facts.groups)
    with llm(folders["llama-gqa"], kv_memory=160 * bytes_per_token, max_model_len=128) as tight:
        results = tight.generate(PROMPTS, params, progress=False)
        assert tight.engine.built.scheduler.totals.preemptions > 0
    for result, wanted in zip(results, expected, strict=True):
        tokens = [entry and entry.token for entry in result.prompt_logprobs]
        assert tokens == [entry and entry.token for entry in wanted.prompt_logprobs]
        assert result.token_ids == wanted.token_ids


@pytest.mark.usefixtures("executor")
def test_a_row_with_nan_weights_ends_alone(folders, tmp_path):
    """One embedding row is NaN: the prompt that has this token faults, the others go on."""
    with llm(folders["llama-gqa"]) as engine:
        expected = engine.generate([PROMPTS[3]], GREEDY, progress=False)[0]
    broken = shutil.copytree(folders["llama-gqa"], tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.embed_tokens.weight"][198] = torch.nan
    save_file(tensors, broken / "model.safetensors")
    with llm(broken) as engine:
        good = [t for t in PROMPTS[3] if t != 198]
        assert good == PROMPTS[3], "the healthy prompt must not use the broken token"
        bad, result = engine.generate([[7, 198, 9] * 12, good], GREEDY, progress=False)
        assert bad.finish_reason == "error"
        assert bad.error.code == "non_finite_logits"
        assert result.token_ids == expected.token_ids
        again = engine.generate([good], GREEDY, progress=False)[0]
        assert again.token_ids == expected.token_ids
        engine.engine.built.scheduler.check()


@pytest.mark.usefixtures("executor")
def test_a_row_that_runs_out_of_memory_ends_alone(folders, monkeypatch):
    with llm(folders["llama-gqa"]) as engine:
        expected = engine.generate([PROMPTS[3]], GREEDY, progress=False)[0]

        def starving(ids, compute):
            if 77 in ids.tolist():
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")
            return compute()

        around_forward(monkeypatch, engine.engine.built.executor, starving)
        assert 77 not in PROMPTS[3] + expected.token_ids
        bad, good = engine.generate([[77, 3, 4], PROMPTS[3]], GREEDY, progress=False)
        assert bad.error.code == "out_of_memory"
        assert good.token_ids == expected.token_ids


@pytest.mark.usefixtures("executor")
def test_an_engine_that_breaks_answers_everybody(folders, monkeypatch):
    with llm(folders["llama-gqa"]) as engine:
        around_forward(
            monkeypatch,
            engine.engine.built.executor,
            lambda *_: (_ for _ in ()).throw(ValueError("boom")),
        )
        results = engine.generate([[1, 2], [3]], GREEDY, progress=False)
        assert {r.finish_reason for r in results} == {"error"}
        assert "boom" in results[0].error.message
        with pytest.raises(Exception, match="boom"):
            engine.generate([[1]], GREEDY, progress=False)


def test_streams_run_side_by_side_and_stop_strings_span_tokens():
    engine = LLM.in_process(
        "builtin", threads=1, kv_memory="16MiB", dtype="float32", max_num_seqs=8
    )

    async def collect(text: str, params: SamplingParams):
        pieces, result = [], None
        async for delta in engine.stream_async(text, params):
            pieces.append(delta.text)
            result = delta.result
        return "".join(pieces), result

    async def both():
        free = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        return await asyncio.gather(collect("def add(a, b):", free), collect("import os\n", free))

    with engine:
        (text, result), (other, _) = asyncio.run(both())
        assert text == result.text
        assert text != other
        stop = text[11:19]
        cut = engine.generate(
            "def add(a, b):",
            SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=[stop]),
            progress=False,
        )[0]
        assert cut.text == text[: text.index(stop)]
        assert cut.finish_reason == "stop"
        assert cut.stop_string == stop
        assert len(cut.token_ids) < 40
        engine.engine.built.scheduler.check()


def test_leaving_a_stream_frees_its_memory(folders):
    with llm(folders["llama-gqa"]) as engine:
        stream = engine.stream(PROMPTS[0], SamplingParams(max_tokens=300, ignore_eos=True))
        next(stream)
        stream.close()
        engine.generate([[1, 2, 3]], GREEDY, progress=False)
        scheduler = engine.engine.built.scheduler
    assert scheduler.idle
    assert all(pool.held == 0 for pool in scheduler.cache.pools)


def test_wrong_prompts_are_refused_before_anything_starts(folders):
    with llm(folders["llama-gqa"], max_model_len=64) as engine:
        for bad, message in (
            ([[]], "empty"),
            ([[1, 199]], "token id 199"),
            ([[True]], "list of token ids"),
            ([b"raw"], "list of token ids"),
            ([None], "list of token ids"),
            ([["a", "b"]], "list of token ids"),
        ):
            with pytest.raises(ParameterError, match=message):
                engine.generate(bad, GREEDY, progress=False)
        with pytest.raises(PromptTooLongError, match="64"):
            engine.generate([[1] * 64], GREEDY, progress=False)
        with pytest.raises(ParameterError, match="vocabulary"):
            engine.generate([[1]], SamplingParams(logit_bias={199: 1.0}), progress=False)
        assert engine.generate([[1] * 63], progress=False)[0].finish_reason in ("length", "stop")


def test_numpy_ids_are_ids(folders):
    with llm(folders["llama-gqa"]) as engine:
        plain = engine.generate([PROMPTS[1]], GREEDY, progress=False)[0]
        for same in (np.array(PROMPTS[1]), [np.int64(t) for t in PROMPTS[1]]):
            assert engine.generate(same, GREEDY, progress=False)[0].token_ids == plain.token_ids


def test_results_come_as_they_end(folders):
    lengths = [9, 3, 6]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    with llm(folders["llama-gqa"]) as engine:
        ended = [index for index, _ in engine.generate_iter(PROMPTS[:3], params)]
    assert ended == [1, 2, 0]


def test_a_closed_event_loop_does_not_hurt_the_engine(folders):
    with llm(folders["llama-gqa"]) as engine:

        async def leave_early():
            async for _ in engine.stream_async(PROMPTS[0], SamplingParams(max_tokens=300)):
                break

        for _ in range(3):
            asyncio.run(leave_early())
        assert engine.generate([[1, 2]], GREEDY, progress=False)[0].finish_reason == "length"


def test_a_sink_that_fails_loses_its_own_requests_only(folders, caplog):
    with llm(folders["llama-gqa"]) as engine:
        request = engine._assemblies([[1, 2, 3]], [GREEDY])[0].request

        def broken(updates):
            raise ValueError(f"a bug of the caller, given {updates}")

        engine.engine.client.submit([request], broken)
        result = engine.generate([PROMPTS[1]], GREEDY, progress=False)[0]
        assert result.finish_reason == "length"
    assert "its requests are cancelled" in caplog.text


def test_an_engine_that_is_dropped_is_closed(folders):
    engine = llm(folders["llama-gqa"])
    thread = engine.engine._thread._thread
    assert thread.is_alive()
    del engine
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_base_seed_counts_accepted_requests_only(folders):
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    tokens = []
    for refused in (False, True):
        with llm(folders["llama-gqa"], base_seed=5) as engine:
            if refused:
                with pytest.raises(ParameterError):
                    engine.generate([[1], []], params, progress=False)
            tokens.append(engine.generate([PROMPTS[1]], params, progress=False)[0].token_ids)
    assert tokens[0] == tokens[1]


def test_deltas_carry_the_tokens_of_the_result():
    with LLM.in_process("builtin", threads=1, kv_memory="16MiB", max_num_seqs=8) as engine:
        free = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        text = engine.generate("def add(a, b):", free, progress=False)[0].text
        stopping = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=[text[5:8]])
        deltas = list(engine.stream("def add(a, b):", stopping))
    result = deltas[-1].result
    assert [t for d in deltas for t in d.token_ids] == result.token_ids
    assert "".join(d.text for d in deltas) == result.text


def test_bfloat16_stays_near_float32(folders):
    """Greedy choices in bfloat16 are within the gap that bfloat16 itself causes."""
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=20, ignore_eos=True)
    with llm(folders["llama-gqa"], dtype="bfloat16") as engine:
        results = engine.generate(PROMPTS, params, progress=False)
    model = build("llama-gqa")
    for tokens, result in zip(PROMPTS, results, strict=True):
        with torch.no_grad():
            exact = model(torch.tensor([tokens + result.token_ids])).logits[0]
        for i, token in enumerate(result.token_ids):
            row = exact[len(tokens) + i - 1]
            assert float(row.max() - row[token]) < 0.05 * float(row.std()) + 0.1
