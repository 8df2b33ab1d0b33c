"""Shapes, hardware sheets, tallies and the roofline, against arithmetic by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import weft
from weft.core.errors import ConfigError, InvariantError, OutOfMemoryError, UnsupportedModelError
from weft.core.plan import SubBatch, Tier
from weft.cost.hardware import HARDWARE, PCIE4, Hardware, hardware
from weft.cost.model import Terms, step_time
from weft.cost.roofline import NO_OVERHEAD, Overhead, Roofline
from weft.cost.shape import SHAPES, ModelShape, model_shape
from weft.cost.work import Work

# Parameters in thousand millions as the model cards state them.
PUBLISHED = {
    "llama-2-7b": 6.74,
    "llama-2-13b": 13.0,
    "llama-2-70b": 69.0,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.6,
    "yi-34b": 34.4,
    "mistral-7b": 7.24,
    "qwen2.5-7b": 7.62,
    "qwen3-8b": 8.19,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
    "phi-4": 14.7,
    "deepseek-67b": 67.4,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_catalogued_models_have_their_published_size(name):
    assert model_shape(name).parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.005)


def test_a_mixture_multiplies_a_token_by_few_of_its_weights():
    shape = model_shape("qwen3-30b-a3b")
    assert shape.active_parameters / 1e9 == pytest.approx(3.3, rel=0.1)  # "A3B"
    assert shape.parameters > 9 * shape.active_parameters


def test_kv_of_a_token():
    assert model_shape("llama-3.1-8b").kv_values_per_token * 2 == 128 * 1024
    assert model_shape("llama-2-7b").kv_values_per_token * 2 == 512 * 1024


def test_the_builtin_model_is_catalogued_as_it_is():
    config = json.loads(
        (Path(weft.__file__).parent / "builtin" / "config.json").read_text(encoding="utf-8")
    )
    assert ModelShape.from_config(config, "weft-builtin") == model_shape("weft-builtin")


def test_windows_and_experts_are_read_from_configs():
    config = {
        "model_type": "x",
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 100,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    shape = ModelShape.from_config(config)
    assert (shape.window, shape.window_layers, shape.kv_heads, shape.head_size) == (32, 2, 4, 16)
    assert (shape.experts, shape.experts_per_token) == (8, 2)
    older = {key: value for key, value in config.items() if key != "layer_types"}
    assert ModelShape.from_config(older).window_layers == 4
    assert ModelShape.from_config(older | {"model_type": "gemma2"}).window_layers == 2
    assert ModelShape.from_config(older | {"sliding_window_pattern": 3}).window_layers == 3
    gated = ModelShape.from_config(older | {"model_type": "muse_glimmer_text"})
    assert gated.attention_parameters - shape.attention_parameters == (
        shape.hidden * shape.attention_width
    )
    off = ModelShape.from_config(config | {"use_sliding_window": False})
    assert off.window is None
    with pytest.raises(UnsupportedModelError, match="vocab_size"):
        ModelShape.from_config({k: v for k, v in config.items() if k != "vocab_size"})


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ConfigError, match=r"Did you mean 'llama-3.1-8b'.*yi-34b"):
        model_shape("llama-3.1-9b")
    with pytest.raises(ConfigError, match=r"Did you mean 'a100'.*l40s"):
        hardware("a1000")
    with pytest.raises(ConfigError, match="t4 does not compute in bf16, but in: fp16"):
        Roofline(model_shape("llama-2-7b"), hardware("t4"))
    with pytest.raises(ConfigError, match="no links"):
        Roofline(model_shape("llama-2-7b"), hardware("a10g"), tp=2)


@pytest.mark.parametrize("name", HARDWARE)
def test_every_sheet_is_whole(name):
    sheet = hardware(name)
    assert sheet.peak(sheet.dtype) > 1e11
    assert sheet.bandwidth > 1e10
    assert sheet.memory > 2**33
    assert (sheet.host is None) == (sheet.link == 0)


rows = st.lists(
    st.tuples(
        st.integers(0, 5000), st.integers(1, 5000), st.booleans(), st.sampled_from(list(Tier))
    ),
    max_size=30,
)


@given(rows, rows)
def test_rows_join_and_leave_a_tally_exactly(first, second):
    work = Work()
    for row in first:
        work.add(*row)
    before = work.copy()
    for row in second:
        work.add(*row)
    alone = Work()
    for row in second:
        alone.add(*row)
    assert before.joined(alone) == work
    for row in second:
        work.remove(*row)
    assert work == before
    assert work is not before


def test_the_tally_of_a_planned_batch():
    batch = SubBatch(
        rows=(0, 1, 2, 3),
        starts=(0, 100, 60, 9),
        counts=(40, 1, 20, 1),
        samples=(True, True, False, True),
        drafts={3: (7, 8)},
    )
    assert Work.of(batch) == Work(
        tokens=64,
        sampled=5,
        prefills=3,
        prefill_area=40 * 20 + 20 * 70 + 3 * 10.5,
        prefill_context=40 + 80 + 12,
        decodes=1,
        decode_context=101,
    )
    host = SubBatch((0, 1), (100, 64), (1, 64), (True, False), (Tier.HOST, Tier.HOST))
    tally = Work.of(host)
    assert (tally.host_decodes, tally.host_context, tally.decodes) == (1, 101, 0)
    assert (tally.prefills, tally.out_tokens, tally.in_tokens) == (1, 65, 64)


def roofline(**options) -> Roofline:
    return Roofline(model_shape("llama-2-7b"), hardware("a100"), overhead=NO_OVERHEAD, **options)


def tally(*added) -> Work:
    work = Work()
    for row in added:
        work.add(*row)
    return work


def test_a_decode_step_is_bound_by_memory():
    terms = roofline().terms(tally((999, 1)))
    shape = model_shape("llama-2-7b")
    weights = shape.layers * shape.layer_parameters * 2
    assert terms.dense == pytest.approx(weights / 2039e9)
    assert terms.decode_attention == pytest.approx(1000 * 512 * 1024 / 2039e9)
    assert terms.head == pytest.approx(4096 * 32000 * 2 / 2039e9)
    assert terms.prefill_attention == terms.cpu_attention == terms.kv_move == 0


def test_a_prompt_is_bound_by_arithmetic():
    terms = roofline().terms(tally((0, 4000, False)))
    shape = model_shape("llama-2-7b")
    weights = shape.layers * shape.layer_parameters
    assert terms.dense == pytest.approx(2 * 4000 * weights / 312e12)
    assert terms.prefill_attention == pytest.approx(4 * 4096 * 32 * 4000 * 2000 / 312e12)
    assert terms.head == terms.sampling == 0


def test_quadratic_costs_do_not_depend_on_chunks():
    whole = roofline().terms(tally((0, 4000))).prefill_attention
    chunks = [tally((start, 500)) for start in range(0, 4000, 500)]
    assert sum(roofline().terms(c).prefill_attention for c in chunks) == pytest.approx(whole)


def test_tensor_parallelism_splits_work_and_adds_collectives():
    shape, one = model_shape("llama-2-70b"), tally((999, 1))
    whole = Roofline(shape, hardware("a100"), overhead=NO_OVERHEAD).terms(one)
    split = Roofline(shape, hardware("a100"), tp=4, overhead=NO_OVERHEAD).terms(one)
    assert split.dense == pytest.approx(whole.dense / 4)
    assert split.decode_attention == pytest.approx(whole.decode_attention / 4)
    assert whole.collectives == 0 < split.collectives
    with pytest.raises(ConfigError, match="64 heads of llama-2-70b cannot be split over tp=3"):
        Roofline(shape, hardware("a100"), tp=3)


def test_a_mixture_reads_the_experts_that_tokens_go_to():
    cost = Roofline(model_shape("qwen3-30b-a3b"), hardware("h100"), overhead=NO_OVERHEAD)
    times = [cost.terms(tally(*[(99, 1)] * n)).dense for n in (1, 8, 64, 256)]
    shape = model_shape("qwen3-30b-a3b")
    one = shape.layers * shape.active_layer_parameters * 2 / 3350e9
    every = shape.layers * shape.layer_parameters * 2 / 3350e9
    assert times[0] == pytest.approx(one, rel=1e-6)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(every, rel=0.001)


def test_every_token_reads_the_shared_experts():
    shape = model_shape("qwen3-30b-a3b")
    alone, shared = (
        Roofline(one, hardware("h100"), overhead=NO_OVERHEAD).terms(tally((99, 1))).dense
        for one in (shape, replace(shape, shared=512))
    )
    more = shape.layers * 3 * 2048 * 512
    assert shared - alone == pytest.approx(more * 2 / 3350e9)
    assert replace(shape, shared=512).active_parameters - shape.active_parameters == more


@pytest.mark.parametrize(
    "keys",
    [
        {"n_routed_experts": 8, "n_shared_experts": 2},
        {"moe_num_experts": 8, "moe_num_shared_experts": 2, "moe_k": 3},
        {"num_experts": 8, "shared_expert_intermediate_size": 96},
        {"num_local_experts": 8, "shared_intermediate_size": 96},
    ],
)
def test_shared_experts_are_read_from_configs(keys):
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 9}
    sizes |= {"intermediate_size": 128, "moe_intermediate_size": 48}
    routed = {} if "moe_k" in keys else {"num_experts_per_tok": 3}
    shape = ModelShape.from_config(sizes | routed | keys)
    assert (shape.experts, shape.experts_per_token, shape.shared) == (8, 3, 96)


def test_a_window_bounds_what_attention_reads():
    cost = Roofline(model_shape("mistral-7b"), hardware("a100"), overhead=NO_OVERHEAD)
    short, at, far = (cost.terms(tally((n - 1, 1))).decode_attention for n in (2048, 4096, 40960))
    assert at == pytest.approx(2 * short)
    assert far == at


def test_host_work_takes_the_hosts_bandwidth_and_the_link():
    terms = roofline().terms(tally((999, 1, True, Tier.HOST)))
    assert terms.cpu_attention == pytest.approx(1000 * 512 * 1024 / 204.8e9)
    assert terms.kv_move == pytest.approx((512 * 1024 + 4096 * 2 * 32) / PCIE4)
    swap = Work(out_tokens=100, in_tokens=40)
    assert roofline().terms(swap) == Terms(kv_move=pytest.approx(100 * 512 * 1024 / PCIE4))
    on_cpu = Roofline(model_shape("llama-2-7b"), hardware("xeon-6342"))
    with pytest.raises(ConfigError, match="no host"):
        on_cpu.terms(swap)


def test_overhead_is_of_the_step_and_of_its_rows():
    cost = Roofline(model_shape("llama-2-7b"), hardware("a100"), overhead=Overhead(1e-3, 1e-5))
    assert cost.terms(tally(*[(9, 1)] * 10)).host == pytest.approx(1.1e-3)
    assert cost.terms(Work()) == Terms()


class Given:
    """A cost model that answers with given terms: by the tokens of the work."""

    layers = 1

    def __init__(self, **by_tokens: Terms) -> None:
        self.by_tokens = {int(key[1:]): terms for key, terms in by_tokens.items()}

    def terms(self, work: Work) -> Terms:
        return self.by_tokens[work.tokens]


def test_two_sub_batches_overlap_as_neo_says():
    first = Terms(dense=4, prefill_attention=2, decode_attention=1, cpu_attention=8, kv_move=1)
    second = Terms(dense=3, collectives=1, cpu_attention=6, kv_move=2)
    cost = Given(_1=first, _2=second, _3=Terms(dense=100, host=10, head=1))
    pair = [Work(tokens=1), Work(tokens=2)]
    assert step_time(cost, pair) == max(4, 6) + max(4 + 3, 8) + 11
    assert step_time(cost, pair[:1]) == 4 + max(3, 8)
    slow = Given(_1=first._replace(kv_move=50), _2=second, _3=Terms())
    assert step_time(slow, pair) == 52
    with pytest.raises(InvariantError, match="not 3"):
        step_time(cost, [*pair, Work()])


def test_room_for_kv_or_by_how_much_it_lacks():
    cost = Roofline(model_shape("llama-3.1-8b"), hardware("a10g"))
    room = cost.kv_room()
    weights = model_shape("llama-3.1-8b").parameters * 2
    assert room == int((0.9 * 23028 * 2**20 - weights) / (128 * 1024))
    with pytest.raises(OutOfMemoryError, match=r"llama-3.1-70b in bf16 needs .* bytes short"):
        Roofline(model_shape("llama-3.1-70b"), hardware("a100")).kv_room()
    big = Roofline(model_shape("llama-3.1-70b"), hardware("a100"), tp=4)
    assert big.kv_room() > 100_000


@given(rows.filter(bool), st.sampled_from(sorted(SHAPES)))
def test_more_work_never_takes_less_time(added, name):
    sheet = hardware("a100")
    cost = Roofline(model_shape(name), sheet)
    work = Work()
    last = 0.0
    for start, count, sampled, _ in added:
        work.add(start, count, sampled)
        terms = cost.terms(work)
        assert min(terms) >= 0
        # Windows are bounded on the mean of contexts, which a short row lowers.
        if model_shape(name).window is None:
            assert terms.total >= last - 1e-12
        last = terms.total


def test_a_row_moves_its_state_there_and_back():
    """Once in a chunk, unless its arithmetic takes longer."""
    shape = model_shape("qwen3.6-27b")
    assert shape.recurrent is not None
    plain = replace(shape, layers=shape.attention_layers, recurrent=None)
    sheet = Hardware("one", {"bf16": 1e15}, 1e12, 2**40)
    both = [Roofline(one, sheet, overhead=NO_OVERHEAD) for one in (shape, plain)]
    decode, prompt = Work(), Work()
    for start in (99, 499, 999):
        decode.add(start, 1)
    prompt.add(0, 4096)
    state_s = 2 * shape.state_bytes / 1e12
    found, without = (one.terms(decode).decode_attention for one in both)
    assert found - without == pytest.approx(3 * state_s)
    found, without = (one.terms(prompt).prefill_attention for one in both)
    arithmetic = 4096 * 6 * 48 * 48 * 128 * 128 / 1e15
    assert found - without == pytest.approx(max(state_s, arithmetic))
    assert both[0].state_tokens == round(shape.state_bytes / (16 * 2 * 4 * 256 * 2))
    with pytest.raises(ConfigError, match="not split over tp=2"):
        Roofline(shape, replace(sheet, collective=1e11), tp=2)
