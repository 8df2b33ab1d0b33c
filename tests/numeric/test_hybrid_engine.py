"""The engine with recurrent layers: cuts, prefix hits, preemption and retries change no bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import build, likeliest_by_reference, prompt, save, save_with_tokenizer
from tight_kv import least_kv_memory, run, settings_for, traffic

from weft import LLM, SamplingParams
from weft.core.errors import (
    ConfigError,
    KernelError,
    OutOfMemoryError,
    UnsupportedModelError,
)
from weft.core.kv_split import LEAST_SLOTS
from weft.core.plan import RowAdd, StepPlan
from weft.cost.steps import Stage, StepRow
from weft.engine.build import build_engine
from weft.engine.model import resolve_settings
from weft.engine.recurrent import check_recurrent
from weft.engine.timer import Timer, room_of
from weft.kernels.ops import select_ops
from weft.models.layout import num_parameters
from weft.models.spec_reader import read_spec, spec_from_config

CASES = ["qwen3.5", "qwen3.5-layers", "kimi-linear", "lfm3", "granite-hybrid", "nemotron-h-moe"]
KINDS = ["qwen3.5", "kimi-linear", "lfm2", "nemotron-h"]  # of recurrent layers
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
PROMPTS = [prompt(90, 1), prompt(7, 2), prompt(90, 1)[:70] + prompt(5, 3), prompt(33, 4), [5]]


ROPE = {
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rope_type": "default",
}
PUBLISHED = {  # the text models of Qwen3.6, as their configurations state them
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "output_gate_type": "swish",
    "rms_norm_eps": 1e-6,
    "rope_parameters": ROPE,
    "vocab_size": 248320,
}
DENSE = PUBLISHED | {
    "model_type": "qwen3_5_text",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "linear_num_value_heads": 48,
}
SPARSE = PUBLISHED | {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 32,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


@pytest.mark.parametrize(
    ("text", "wrapper", "recurrent", "slot_mib", "billions"),
    [
        (DENSE, "Qwen3_5ForConditionalGeneration", 48, 149.6, 26.9),
        (SPARSE, "Qwen3_5MoeForConditionalGeneration", 30, 62.8, 34.7),
    ],
)
def test_published_configurations_are_read(text, wrapper, recurrent, slot_mib, billions):
    kind = text["model_type"].removesuffix("_text")
    spec = spec_from_config(
        {"architectures": [wrapper], "model_type": kind, "text_config": text, "vision_config": {}}
    )
    assert spec.states is not None
    assert len(spec.states.layers) == recurrent
    assert spec.states.slot_bytes / 2**20 == pytest.approx(slot_mib, abs=0.1)
    assert num_parameters(spec) / 1e9 == pytest.approx(billions, abs=0.1)
    assert spec.ropes[0].rotary_dim == 64


@pytest.mark.parametrize("change", [{"attn_output_gate": False}, {"output_gate_type": "sigmoid"}])
def test_gates_that_weft_does_not_compute_are_refused(change):
    with pytest.raises(UnsupportedModelError, match=next(iter(change))):
        spec_from_config(DENSE | {"architectures": ["Qwen3_5ForCausalLM"]} | change)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    names = {*CASES, *KINDS}
    return {n: save_with_tokenizer(build(n), tmp_path_factory.mktemp(n)) for n in names}


def llm(folder: Path, **settings) -> LLM:
    defaults = {"dtype": "float32", "threads": 1, "kv_memory": "4MiB", "max_num_seqs": 8}
    return LLM.in_process(folder, device="cpu", **{**defaults, **settings})


def answers(engine: LLM, prompts: list[list[int]], sampling: SamplingParams = GREEDY) -> list:
    """Tokens with log probabilities to the bit."""
    return [(r.token_ids, r.logprobs) for r in engine.generate(prompts, sampling, progress=False)]


def scheduler_of(engine: LLM):
    return engine.engine.built.scheduler


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("kernels", "depth"), [("cpu", 0), ("cpu", 1), ("reference", 0)])
def test_greedy_tokens_equal_the_reference(folders, name, kernels, depth):
    model = build(name)
    with llm(folders[name], steps_in_flight=depth, kernels=kernels) as engine:
        found = answers(engine, PROMPTS)
        scheduler_of(engine).check()
    for tokens, (ids, _) in zip(PROMPTS, found, strict=True):
        assert list(ids) == likeliest_by_reference(model, tokens, list(ids))


@pytest.mark.parametrize("name", CASES)
def test_a_prompt_cut_at_every_position_gives_the_same_bits(folders, name):
    """Also between a mark and the tokens after it."""
    tokens = prompt(50, 1)
    sampling = replace(GREEDY, max_tokens=5)
    found = []
    for cut in (*range(1, 51), 500):
        settings = {"max_num_seqs": 1, "max_num_batched_tokens": cut, "block_size": 8}
        with llm(folders[name], **settings) as engine:
            found.append(answers(engine, [tokens], sampling))
    assert all(answer == found[-1] for answer in found)


@pytest.mark.parametrize(("name", "depth"), [("qwen3.5", 0), *((name, 1) for name in KINDS)])
def test_prefix_hits_change_no_bit(folders, name, depth):
    """Turns of a conversation, a branch, and the same prompt again, beside cold ones."""
    settings = {"max_num_batched_tokens": 64, "steps_in_flight": depth, "block_size": 8}
    with llm(folders[name], **settings) as warm:
        text, turns, hits = prompt(61, 1), [], []
        for turn in range(4):
            before = scheduler_of(warm).totals.cached_tokens
            found = answers(warm, [text])
            hits.append(scheduler_of(warm).totals.cached_tokens - before)
            turns.append((list(text), found))
            text = [*text, *found[0][0], *prompt(9, 10 + turn)]
        again = answers(warm, [turns[0][0]])
        branches = [prompt(61, 1)[:40] + prompt(20, 20 + i) for i in range(3)]
        for branch in branches:
            before = scheduler_of(warm).totals.cached_tokens
            turns.append((branch, answers(warm, [branch])))
            hits.append(scheduler_of(warm).totals.cached_tokens - before)
        scheduler_of(warm).check()
    assert again == turns[0][1]
    assert hits == [0, 80, 104, 136, 0, 40, 40]
    with llm(folders[name], prefix_caching=False) as cold:
        for tokens, found in turns:
            assert answers(cold, [tokens]) == found


PREEMPTED = [(KINDS[0], seed, *room) for seed in range(2) for room in ((3, 0), (12, 0), (12, 1))]
PREEMPTED += [(name, 1, 40, 1) for name in KINDS] + [(KINDS[0], 0, 40, 1)]


@pytest.mark.parametrize(("name", "seed", "slots", "depth"), PREEMPTED)
def test_preempted_sequences_go_on_as_if_nothing_had_been(
    folders, monkeypatch, name, seed, slots, depth
):
    """Blocks are short, slots are few or many: for one sequence, without marks, and with many."""
    folder = folders[name]
    ample = build_engine(settings_for(folder, prefix_caching=False))
    expected, _ = run(ample, traffic(seed, cancels=False), monkeypatch)
    monkeypatch.setattr("weft.core.resolved.state_slots", lambda *_: slots)
    memory = least_kv_memory(folder)
    tight = build_engine(settings_for(folder, kv_memory=memory, steps_in_flight=depth))
    found, plans = run(tight, traffic(seed, cancels=False), monkeypatch)
    assert found == expected
    assert tight.scheduler.totals.preemptions > 0 or slots == LEAST_SLOTS
    assert tight.scheduler.cache.states.pool.held == 0
    if slots == 40:
        assert any(_start_of(add, plan) for plan in plans for add in plan.add if _resumed(add))
    cancelled, _ = run(
        build_engine(settings_for(folder, kv_memory=memory)),
        traffic(seed, cancels=True),
        monkeypatch,
    )
    assert cancelled.keys() <= expected.keys()


def _resumed(add: RowAdd) -> bool:
    return len(add.tokens) > add.num_prompt


def _start_of(add: RowAdd, plan: StepPlan) -> int:
    (batch,) = plan.batches
    return batch.starts[batch.rows.index(add.row)]


def test_a_step_without_memory_is_computed_again_row_by_row(folders, monkeypatch):
    """A step fails after it has written states; what it is computed again from is what it was."""
    with llm(folders["qwen3.5"]) as engine:
        expected = answers(engine, PROMPTS)
    with llm(folders["qwen3.5"], resident="off") as engine:
        seen = []

        def starving(ids, compute):
            result = compute()
            seen.append(len(ids))
            if len(ids) > 1 and len(seen) % 3 == 0:
                raise MemoryError
            return result

        executor = engine.engine.built.executor
        recur = executor._recur
        monkeypatch.setattr(
            executor, "_recur", lambda ids, *more: starving(ids, lambda: recur(ids, *more))
        )
        assert answers(engine, PROMPTS) == expected
        assert len(seen) > 30
        scheduler_of(engine).check()


def test_few_slots_serve_many_rows_in_turns(folders):
    with llm(folders["qwen3.5"]) as engine:
        expected = answers(engine, PROMPTS)
    few = settings_for(folders["qwen3.5"], kv_memory=2**18, max_num_seqs=8)
    _, resolved = resolve_settings(few)
    assert LEAST_SLOTS <= resolved.state_slots < 8
    settings = {"kv_memory": 2**18, "max_model_len": 120, "block_size": 8}
    with llm(folders["qwen3.5"], **settings) as engine:
        assert answers(engine, PROMPTS) == expected


def test_memory_for_less_than_the_fewest_slots_is_refused(folders):
    with pytest.raises(OutOfMemoryError, match=r"slot of recurrent state needs 30\.75 KiB"):
        resolve_settings(settings_for(folders["qwen3.5"], kv_memory=2**16, max_model_len=16))


@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2},
        {"overlap": "on", "device": "cuda"},
    ],
)
@pytest.mark.parametrize("name", KINDS)
def test_engines_that_cannot_keep_states_refuse(folders, name, settings):
    config = settings_for(folders[name], **settings)
    spec = read_spec(folders[name])
    with pytest.raises(ConfigError, match="recurrent") as caught:
        check_recurrent(config, spec, select_ops("cpu", "float32"), "cpu")
    assert caught.value.param in settings


@pytest.mark.parametrize(
    "settings", [{"host_kv_memory": 2**20, "scheduler": "fcfs"}, {"resident": "on"}]
)
def test_states_stay_on_a_gpu(folders, settings):
    config, spec = settings_for(folders["qwen3.5"], **settings), read_spec(folders["qwen3.5"])
    with pytest.raises(ConfigError, match="recurrent") as caught:
        check_recurrent(config, spec, select_ops("cpu", "float32"), "cuda:0")
    assert caught.value.param in settings


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qwen3.5", {"linear_key_head_dim": 24}),
        ("kimi-linear", {"linear_head_dim": 24}),
        ("lfm2", {"hidden_size": 72}),
        ("nemotron-h", {"ssm_state_size": 24}),
    ],
)
def test_odd_sizes_are_refused(folders, tmp_path, name, change):
    config = settings_for(folders[name])
    odd = build(name)
    for key, value in change.items():
        setattr(odd.config, key, value)
    odd.config.save_pretrained(tmp_path)
    with pytest.raises(KernelError, match="set kernels to reference"):
        check_recurrent(config, read_spec(tmp_path), select_ops("cpu", "float32"), "cpu")


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_and_quantised_weights_are_batch_invariant(folders, name):
    for settings in ({"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantize": "int8"}):
        with llm(folders[name], **settings, prefix_caching=False) as engine:
            together = answers(engine, PROMPTS)
            assert [answers(engine, [tokens])[0] for tokens in PROMPTS] == together


def test_a_checkpoint_with_another_tower_is_read(tmp_path):
    import transformers

    text = build("qwen3.5")
    config = transformers.Qwen3_5Config(
        text_config=text.config.to_dict(),
        vision_config={"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 16},
    )
    whole = transformers.Qwen3_5ForConditionalGeneration(config).eval().requires_grad_(False)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    save(whole, tmp_path)
    spec = read_spec(tmp_path)
    assert spec.family == "qwen3_5"
    torch.set_num_threads(1)
    with llm(save_with_tokenizer(whole, tmp_path)) as engine:
        ids = answers(engine, [PROMPTS[0]])[0][0]
    assert list(ids) == likeliest_by_reference(text, PROMPTS[0], list(ids))


def test_steps_that_are_measured_have_states(folders):
    config = settings_for(folders["qwen3.5"])
    engine = build_engine(config)
    room = room_of(config, engine.model, engine.resolved)
    assert room.rows == min(8, engine.resolved.state_slots // 2)
    stage = Stage(Timer(engine.executor).run, room)
    rows = tuple(StepRow(8 * row, 1 + row) for row in range(room.rows))
    assert len(stage.measure(rows, 1)) >= 1
    stage.close()
    engine.close()
