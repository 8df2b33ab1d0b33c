"""The graph executor equals the eager one, from the uploaded buffer alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from checkpoints import build, prompt, save, save_with_tokenizer
from crowds import piggybacking
from graphed import SIZES, BlindDevice, graph_executor, use_graphs
from test_overlap import overlapping
from tight_kv import settings_for

from depth import deep
from weft import LLM, SamplingParams
from weft.core.config import EngineConfig
from weft.core.errors import ConfigError, InvariantError
from weft.core.plan import KVMove, RowAdd, StepPlan, SubBatch, Tier
from weft.cost.curves import Curve
from weft.cost.fit import FEATURES, Fitted
from weft.engine.build import build_engine
from weft.engine.costs import profile_key
from weft.engine.model import _step_sizes, find_model
from weft.exec.device import HostDevice
from weft.exec.functions import StepFunctions
from weft.exec.graphs import GraphExecutor
from weft.exec.input_batch import InputBatch
from weft.exec.step_layout import (
    HASH_WORDS,
    PROMPT_SIZES,
    Buffer,
    LaneSizes,
    captured_sizes,
    forward_layout,
    lane_layout,
    larger_sizes,
    overlapped_layout,
    padded_size,
    sample_layout,
    sizes_for,
)
from weft.exec.step_layout import SIZES as ALL_SIZES
from weft.exec.step_packer import StepPacker
from weft.exec.workspace import StepSizes, pinned_bytes, workspace_bytes
from weft.kernels.lanes import lanes_for

FREE = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SHORT = replace(FREE, max_tokens=16)
DRAWN = replace(FREE, temperature=0.9, seed=5)
# Requests of every kind that needs something else of a step.
KINDS = [
    FREE,
    DRAWN,
    replace(DRAWN, top_p=0.8, top_k=20, min_p=0.02, seed=2**40),
    replace(FREE, speculation=6, max_tokens=60),
    replace(DRAWN, speculation=5, logit_bias={300: 12.0, 301: 11.0}),
    replace(DRAWN, speculation=3, logprobs=1),
    replace(FREE, logprobs=3, prompt_logprobs=2),
    replace(DRAWN, presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.2),
    replace(FREE, logit_bias={300: 9.0}, min_tokens=12, ignore_eos=False, stop_token_ids=(300,)),
    SamplingParams(temperature=0.8, seed=3, max_tokens=40, grammar="start: /[a-z]{5}[0-9]{9}/"),
    replace(FREE, ignore_eos=False, stop_token_ids=tuple(range(200, 300)), max_tokens=60),
]
# Requests whose tokens are restricted, which the host sees to.
RESTRICTED = [
    FREE,
    replace(DRAWN, allowed_token_ids=tuple(range(200, 260)), logprobs=2, max_tokens=90),
    replace(
        FREE,
        allowed_token_ids=(300, 301, 302),
        bad_token_sequences=((300, 300, 300), (301, 301)),
        logprob_token_ids=(300, 7),
        speculation=4,
        max_tokens=90,
    ),
    replace(DRAWN, bad_token_sequences=tuple((token,) for token in range(500)), max_tokens=90),
]
PROMPTS = [prompt(12, 1) * 4, prompt(7, 2), prompt(150, 3), prompt(9, 3) * 3, [5]]


def packaged(**settings) -> LLM:
    common = {"dtype": "bfloat16", "threads": 1, "kv_memory": "16MiB", "max_model_len": 512}
    common |= {"max_num_seqs": 8, "max_num_batched_tokens": 96}
    return LLM.in_process("builtin", **{**common, **settings})


def everything(llm: LLM):
    """Tokens, log probabilities and ends of requests of every kind in one crowd, and vectors."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(2 * len(KINDS))]
    results = llm.generate(prompts, KINDS * 2, progress=False)
    vectors = llm.embed(PROMPTS)
    llm.engine.built.scheduler.check()
    ends = [(r.token_ids, r.finish_reason, r.logprobs, r.prompt_logprobs) for r in results]
    return ends, [vector.tolist() for vector in vectors]


@pytest.fixture(scope="module")
def expected():
    with packaged() as llm:
        assert llm.engine.served.executor.startswith("eager")
        return everything(llm)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"steps_in_flight": 0},
        {"graphs": False},
        {"max_num_batched_tokens": 17, "speculation": 2},
        {"kv_memory": "1800KiB", "prefix_caching": False},
    ],
)
def test_requests_of_every_kind_get_what_the_eager_executor_gives(expected, settings, monkeypatch):
    in_flight = watch_tokens_in_flight(monkeypatch)
    use_graphs(monkeypatch)
    with packaged(**settings) as llm:
        executor = llm.engine.built.executor
        assert isinstance(executor, GraphExecutor)
        assert everything(llm) == expected
        totals = llm.engine.built.scheduler.totals
        assert totals.drafted_tokens > totals.accepted_tokens > 0
        assert (totals.preemptions > 0) == ("kv_memory" in settings)
        assert (executor._device.replays > 100) == settings.get("graphs", True)
        times = llm.engine.served.start_s
        assert times["ready"] > times["weights"] > 0
    assert any(in_flight) == settings.get("steps_in_flight", True)


@pytest.mark.parametrize("settings", [{}, {"kv_memory": "1540KiB", "prefix_caching": False}])
def test_restricted_requests_get_what_the_eager_executor_gives(settings, monkeypatch):
    asked = RESTRICTED * 3
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(asked))]

    def answers(**more):
        with packaged(**more) as llm:
            found = llm.generate(prompts, asked, progress=False)
            totals = llm.engine.built.scheduler.totals
        return [(r.token_ids, r.finish_reason, r.logprobs) for r in found], totals

    expected, totals = answers()
    assert totals.drafted_tokens > 0
    use_graphs(monkeypatch)
    found, totals = answers(**settings)
    assert found == expected
    assert (totals.preemptions > 0) == bool(settings)
    for params, (tokens, _, logprobs) in zip(asked, found, strict=True):
        assert set(tokens) <= set(params.allowed_token_ids or range(4096))
        whole = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
        assert not {(token,) for token in tokens} & set(params.bad_token_sequences)
        assert not set(whole) & set(params.bad_token_sequences)
        if params.logprob_token_ids:
            assert all({token for token, _ in entry.top} == {300, 7} for entry in logprobs)


def watch_tokens_in_flight(monkeypatch) -> list[int]:
    """How many tokens each step had to take from the one before it."""
    counts: list[int] = []
    forward = StepFunctions.forward

    def watched(self, layout, most, carries):
        ids = layout.views(self.uploaded, self._packer.layout.pivot)["ids"]
        counts.append(int((ids < 0).sum()))
        forward(self, layout, most, carries)

    monkeypatch.setattr(StepFunctions, "forward", watched)
    return counts


FAMILIES = ["qwen3-moe-mixed", "gemma4-shared-kv", "gemma4-moe-key-is-value", "phi3-long"]


@pytest.mark.parametrize("family", FAMILIES)
def test_families_give_what_the_eager_executor_gives(family, tmp_path, monkeypatch):
    folder = save_with_tokenizer(build(family), tmp_path)
    settings = {"dtype": "float32", "threads": 1, "kv_memory": "4MiB", "max_num_seqs": 8}
    prompts = [prompt(90, 1), prompt(7, 2), prompt(60, 4), [5]]
    kinds = [SHORT, replace(DRAWN, max_tokens=16), SHORT, replace(SHORT, logprobs=2)]
    results = []
    for graphs in (False, True):
        if graphs:
            use_graphs(monkeypatch)
        with LLM.in_process(folder, max_num_batched_tokens=64, **settings) as llm:
            done = llm.generate(prompts, kinds, progress=False)
            results.append([(r.token_ids, r.logprobs) for r in done])
    assert results[0] == results[1]


def test_a_request_that_leaves_changes_nobody(monkeypatch):
    """Cancelled while its step is in flight; its row and blocks go to others."""
    with packaged() as llm:
        [whole] = llm.generate([PROMPTS[0]], FREE, progress=False)
    use_graphs(monkeypatch)
    with packaged(max_num_seqs=2) as llm:

        async def leave(number: int) -> None:
            async for _ in llm.stream_async([number] * 30, replace(FREE, max_tokens=300)):
                break

        async def stay() -> list[int]:
            tokens: list[int] = []
            async for delta in llm.stream_async(PROMPTS[0], FREE):
                tokens += delta.token_ids
            return tokens

        async def crowd() -> list[int]:
            tokens, *_ = await asyncio.gather(stay(), *(leave(i) for i in range(9)))
            return tokens

        assert asyncio.run(crowd()) == whole.token_ids
        llm.engine.built.scheduler.check()


# -- by hand ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine():
    """A graph executor with rows that a test fills by hand."""
    from weft.engine import build as building

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "make_executor", graph_executor)
        config = EngineConfig(
            threads=1, kv_memory=2**22, max_model_len=64, max_num_seqs=4, dtype="float32",
            max_num_batched_tokens=100,
        )  # fmt: skip
        yield building.build_engine(config)


def seat(row: int, tokens: tuple[int, ...], **more) -> RowAdd:
    blocks = tuple(range(4 * row, 4 * row + 4))
    params = SamplingParams(temperature=0, seed=1).with_defaults({})
    return RowAdd(row, 100 + row, tokens, len(tokens), params, frozenset(), (blocks,), **more)


def run(executor: GraphExecutor, plans: list[StepPlan]):
    tickets = [executor.launch(plan) for plan in plans]
    return [ticket.result() for ticket in tickets]


def test_launched_steps_go_on_from_tokens_that_the_host_has_not_seen(engine):
    executor = engine.executor
    rows, tokens = (0, 1), (7, 8, 9)
    alone = []
    for _ in range(2):
        adds = (seat(0, tokens), seat(1, tokens[:2]))
        ids = iter(range(1, 9))
        plans = [StepPlan(next(ids), (SubBatch(rows, (0, 0), (3, 2), (True, True)),), add=adds)]
        plans += [
            StepPlan(next(ids), (SubBatch(rows, (3 + i, 2 + i), (1, 1), (True, True)),))
            for i in range(3)
        ]
        drop = StepPlan(next(ids), (), drop=rows)
        if alone:  # launched one ahead
            first, second = executor.launch(plans[0]), executor.launch(plans[1])
            ahead = [
                first.result(),
                second.result(),
                *run(executor, plans[2:]),
                executor.launch(drop).result(),
            ]
        else:
            alone = [executor.launch(plan).result() for plan in [*plans, drop]]
    assert [r.tokens for r in ahead] == [r.tokens for r in alone]
    assert all(len(r.tokens) == 2 for r in alone[:4])


def test_a_token_that_nobody_computes_is_refused(engine):
    executor = engine.executor
    executor.launch(StepPlan(1, (), add=(seat(0, (7, 8)),))).result()
    with pytest.raises(InvariantError, match="not even in flight"):
        executor.launch(StepPlan(2, (SubBatch((0,), (3,), (1,), (True,)),)))
    executor.launch(StepPlan(3, (), drop=(0,))).result()


def test_a_ticket_is_collected_once_and_tickets_in_any_order(engine):
    executor = engine.executor
    batch = SubBatch((0,), (0,), (2,), (True,))
    first = executor.launch(StepPlan(1, (batch,), add=(seat(0, (7, 8)),)))
    second = executor.launch(StepPlan(2, (SubBatch((0,), (2,), (1,), (True,)),)))
    assert second.result().step_id == 2
    assert len(first.result().tokens) == 1
    with pytest.raises(InvariantError, match="twice"):
        first.result()
    executor.launch(StepPlan(3, (), drop=(0,))).result()


def test_two_sub_batches_of_a_step(engine):
    executor = engine.executor
    parts = [SubBatch((row,), (0,), (2,), (True,)) for row in (0, 1, 2)]
    adds = tuple(seat(row, (7, 8)) for row in (0, 1, 2))
    result = executor.launch(StepPlan(1, tuple(parts), add=adds)).result()
    assert result.sequence_ids == (100, 101, 102)
    assert len(set(result.tokens)) == 1
    executor.launch(StepPlan(2, (), drop=(0, 1, 2))).result()


@pytest.mark.parametrize("which", [0, 1], ids=["forward", "sample"])
def test_a_step_that_was_read_by_another_layout_is_found(which, engine, monkeypatch):
    """By what the device has read, once its results are there."""
    executor = engine.executor
    adds, batch = (seat(0, (7, 8)),), SubBatch((0,), (0,), (1,), (which == 1,))
    executor.launch(StepPlan(1, (batch,), add=adds)).result()
    upload = executor._device.upload

    def damaged(source, target):
        upload(source, target)
        executor._packer.layout.hashes(executor._functions.uploaded)[which] += 1

    monkeypatch.setattr(executor._device, "upload", damaged)
    ticket = executor.launch(StepPlan(2, (batch,)))
    with pytest.raises(InvariantError, match="were read as if by"):
        ticket.result()
    monkeypatch.undo()
    executor.launch(StepPlan(3, (), drop=(0,))).result()


def test_a_graph_of_another_layout_is_found(engine, monkeypatch):
    executor = engine.executor
    graphs = executor._steps.sample_graphs
    other = replace(graphs[1, False], layout_hash=graphs[2, False].layout_hash)
    monkeypatch.setitem(graphs, (1, False), other)
    ticket = executor.launch(
        StepPlan(1, (SubBatch((0,), (0,), (1,), (True,)),), add=(seat(0, (7,)),))
    )
    with pytest.raises(InvariantError, match="were read as if by"):
        ticket.result()
    executor.launch(StepPlan(2, (), drop=(0,))).result()


def test_layouts_differ_by_their_hash_and_their_parts_do_not_overlap():
    layouts = [forward_layout(t, min(t, 8), g) for t in (1, 3, 8, 64) for g in (1, 2)]
    layouts += [sample_layout(s) for s in (1, 3, 8, 64)]
    assert len({layout.hash for layout in layouts}) == len(layouts)
    for layout in layouts:
        assert layout.words % 4 == 0
        buffer = torch.zeros(layout.words + 4, dtype=torch.int32)
        for value, view in enumerate(layout.views(buffer, 4).values(), 1):
            view.view(torch.int32).fill_(value)
        written = sum(section.words for section in layout.sections)
        assert int((buffer > 0).sum()) == written
        assert layout.words - written <= 3 * len(layout.sections)


@pytest.mark.parametrize("groups", [1, 3])
def test_whatever_a_kernel_is_given_of_a_step_is_aligned_to_16_bytes(groups):
    """A kernel is compiled once more for an address that 16 does not divide."""
    layouts = [forward_layout(t, min(t, 8), groups) for t in ALL_SIZES]
    layouts += [overlapped_layout((t, t + 3), 8, groups) for t in (1, 2, 5)]
    layouts += [sample_layout(s) for s in ALL_SIZES]
    layouts += [lane_layout(LaneSizes(layers, 5, 9)) for layers in (1, 7)]
    for layout in layouts:
        buffer = torch.zeros(layout.words, dtype=torch.int32)
        for name, view in layout.views(buffer, 0).items():
            rows = view if name.startswith(("slot_mapping", "table_start")) else [view]
            assert all((row.data_ptr() - buffer.data_ptr()) % 16 == 0 for row in rows), name
    for lanes in (None, LaneSizes(7, 5, 9)):
        buffer = Buffer.for_steps(100, 9, [3] * groups, lanes)
        assert (buffer.pivot % 4, buffer.lanes_at % 4) == (0, 0)


def test_sizes():
    assert len(ALL_SIZES) == 35
    assert list(ALL_SIZES) == sorted(set(ALL_SIZES))
    assert ALL_SIZES[-1] == 512
    assert [padded_size(n) for n in (1, 2, 3, 9, 129, 512, 513, 577)] == [
        1, 2, 4, 16, 144, 512, 576, 640
    ]  # fmt: skip
    assert captured_sizes(9) == (1, 2, 4, 8, 16)
    assert sizes_for(1) == sizes_for(512) == ALL_SIZES
    assert sizes_for(600) == (*ALL_SIZES, 576, 640)
    assert captured_sizes(1024, sizes_for(1000))[-3:] == (896, 960, 1024)
    assert captured_sizes(5000) == ALL_SIZES
    assert sizes_for(1, 512) == ALL_SIZES
    assert sizes_for(8, 700) == (*ALL_SIZES, 576, 640, 704)
    assert sizes_for(8, 8192) == (*ALL_SIZES, *PROMPT_SIZES)
    assert sizes_for(8, 1100)[-2:] == (1024, 1152)
    for tokens in (1, 513, 1000, 1100, 2047, 3000):  # of a workspace and of a packer
        assert padded_size(tokens, sizes_for(8, tokens)) == padded_size(tokens)
    assert all(after <= 1.13 * size for size, after in pairwise((512, *PROMPT_SIZES)))
    assert larger_sizes(8192, 512) == (8192, 4096, 2048, 1024)
    assert larger_sizes(1088, 512) == (1088,)
    assert larger_sizes(64, 1) == (64,)
    assert larger_sizes(512, 512) == ()


def test_packed_steps_equal_those_gathered_one_by_one():
    draw = np.random.default_rng(0)
    rows, length, size, windows = 9, 40, 4, (None, 6)
    table = InputBatch(rows, length, [length // size] * 2)
    device = HostDevice()
    packer = StepPacker(table, size, windows, device, rows * length, SIZES)
    table.tokens[:] = draw.integers(0, 1000, table.tokens.shape)
    for blocks in table.tables:
        blocks[:] = draw.permutation(blocks.size).reshape(blocks.shape)
    table.columns.choice[:] = draw.random(table.columns.choice.shape)
    table.columns.seed[:] = draw.integers(0, 2**60, rows)
    for _ in range(100):
        chosen = draw.permutation(rows)[: draw.integers(1, rows + 1)]
        starts = draw.integers(0, length // 2, len(chosen))
        counts = draw.integers(1, length // 4, len(chosen))
        samples = draw.random(len(chosen)) < 0.5
        flying = samples & (draw.random(len(chosen)) < 0.5)
        table.length[chosen] = starts + counts - flying
        table.num_prompt[chosen] = draw.integers(1, 5, len(chosen))
        drafts = {
            int(row): tuple(draw.integers(0, 1000, 3).tolist())
            for row, sampled, away in zip(chosen, samples, flying, strict=True)
            if sampled and not away and draw.random() < 0.3
        }
        batch = SubBatch(
            *(tuple(x.tolist()) for x in (chosen, starts, counts, samples)), drafts=drafts
        )
        packed = packer.pack(batch)
        buffer = packer.buffers[packed.buffer]
        hashes = packed.forward.hash, 0 if packed.sample is None else packed.sample.hash
        assert packer.layout.hashes(buffer).tolist() == list(hashes)
        parts = packed.forward.views(buffer, packer.layout.pivot)
        flat = buffer[packer.layout.pivot + packed.forward.words : packed.words.stop]
        expect = expected_tokens(table, batch, flying, size)
        tokens = len(expect["ids"])
        assert packed.forward.size == padded_size(tokens, SIZES)
        for name, padding in (("ids", 0), ("positions", 0)):
            assert parts[name].tolist() == padded(expect[name], packed.forward.size, padding)
        assert [s[: packed.forward.size].tolist() for s in parts["slot_mapping"]] == [
            padded(slots, packed.forward.size, -1) for slots in expect["slots"]
        ]
        most_rows = min(packed.forward.size, rows)
        contexts = expect["contexts"]
        assert parts["seq_lens"].tolist() == padded(contexts, most_rows, 0)
        assert parts["query_start"].tolist() == padded(expect["bounds"], most_rows + 1, tokens)
        end = 0
        for group, (window, blocks) in enumerate(zip(windows, table.tables, strict=True)):
            for index, (row, context) in enumerate(zip(batch.rows, contexts, strict=True)):
                start, used = int(parts["table_start"][group, index]), -(-context // size)
                wanted = blocks[row, :used].copy()
                if window is not None:
                    wanted[: max(0, starts[index] - window + 1) // size] = -1
                assert start == end
                assert flat[start : start + used].tolist() == wanted.tolist()
                end += used
        assert len(flat) == end
        check_samples(packer, packed, table, expect)


def expected_tokens(table: InputBatch, batch: SubBatch, flying: np.ndarray, size: int) -> dict:
    found: dict = {"ids": [], "positions": [], "bounds": [0], "contexts": [], "samples": []}
    found["slots"] = [[] for _ in table.tables]
    for index, (row, start, count, samples) in enumerate(
        zip(batch.rows, batch.starts, batch.counts, batch.samples, strict=True)
    ):
        known = [*table.tokens[row, : start + count].tolist(), *batch.drafts.get(row, ())]
        if flying[index]:
            known[-1] = -1 - row
        for at in range(start, len(known)):
            found["ids"].append(known[at])
            found["positions"].append(at)
            for slots, blocks in zip(found["slots"], table.tables, strict=True):
                slots.append(int(blocks[row, at // size]) * size + at % size)
            if samples and at >= start + count - 1:
                found["samples"].append((len(found["ids"]) - 1, row, at + 1))
        found["bounds"].append(len(found["ids"]))
        found["contexts"].append(len(known))
    return found


def check_samples(packer: StepPacker, packed, table: InputBatch, expect: dict) -> None:
    wanted = expect["samples"]
    if not wanted:
        assert packed.sample is None
        assert packed.words.start == packer.layout.pivot - HASH_WORDS
        return
    size = packed.sample.size
    assert size == padded_size(len(wanted), SIZES)
    assert packed.words.start == packer.sample_at(packed.sample)
    parts = packed.sample.views(packer.buffers[packed.buffer], packed.words.start)
    at, rows, lengths = (list(x) for x in zip(*wanted, strict=True))
    assert parts["at"].tolist() == padded(at, size, 0)
    assert parts["row"].tolist() == padded(rows, size, packer.max_rows)
    assert parts["seed"].tolist() == padded(table.columns.seed[rows].tolist(), size, 0)
    counters = (np.array(lengths) - table.num_prompt[rows]).tolist()
    assert parts["counter"].tolist() == padded(counters, size, 0)
    settings = parts["settings"].numpy()
    assert (settings[: len(rows)] == table.columns.choice[rows]).all()
    assert not settings[len(rows) :].any()


def padded(values: list[int], size: int, padding: int) -> list[int]:
    return values + [padding] * (size - len(values))


def test_the_device_of_the_tests_notices_what_a_real_one_would_suffer_from():
    device = HostDevice()
    source, target = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    device.upload(source, target)
    source[0] = 9
    with pytest.raises(InvariantError, match="changed before"):
        device.record().wait()
    back = device.host_memory(4, torch.int64)
    device.download(target, back)
    event = device.record()
    assert back.tolist() != [0, 1, 2, 3]
    target.zero_()
    event.wait()
    assert back.tolist() == [0, 1, 2, 3]


def test_a_captured_function_sees_nothing_of_the_rows():
    table = InputBatch(2, 8, [2])
    table.tokens[:] = 3
    seen = []
    device = BlindDevice(table)
    replay = device.capture(lambda: seen.append(int(table.tokens.max())))
    replay()
    assert seen == [3, -77]
    assert (table.tokens == 3).all()


# -- devices ------------------------------------------------------------------------------------


def test_what_steps_need_is_known_before(engine):
    """The static buffers to the byte; what is allocated within steps is bounded from above."""
    executor, packer = engine.executor, engine.executor._packer
    holders = executor._functions, executor._rows.state
    spec, tokens = engine.model.spec, packer.max_tokens
    static = [v for part in holders for v in vars(part).values() if isinstance(v, torch.Tensor)]
    sizes = StepSizes(100, 4, 4, [4])
    least = workspace_bytes(spec, 4, sizes, graphs=False)
    assert sum(tensor.nbytes for tensor in static) < least
    layer = spec.layers[0]
    widths = 2 * spec.hidden_size + 2 * layer.intermediate_size
    assert least > 4 * tokens * widths + 4 * 4 * spec.vocab_size
    assert workspace_bytes(spec, 4, sizes, graphs=True) > least
    assert workspace_bytes(spec, 4, replace(sizes, samples=90), graphs=False) > least
    assert workspace_bytes(spec, 2, sizes, graphs=False) < least


@pytest.mark.parametrize(
    "config_of",
    [
        partial(settings_for, resident="off"),
        partial(settings_for, resident="on", speculation=2),
        partial(piggybacking, resident="off"),
        partial(overlapping, resident="off"),
    ],
    ids=["plain", "leases", "lanes", "overlaps"],
)
def test_what_steps_pin_is_known_before(config_of, tmp_path, monkeypatch):
    """To the byte; the KV of the host is counted by itself."""
    taken = []

    def counted(_: HostDevice, size: int, dtype: torch.dtype) -> torch.Tensor:
        taken.append((size * dtype.itemsize, dtype))
        return torch.zeros(size, dtype=dtype)

    for name in ("host_memory", "exchange_memory"):
        monkeypatch.setattr(HostDevice, name, counted)
    config = config_of(save(build("gemma3"), tmp_path), graphs=False)
    rows = config.max_num_seqs
    monkeypatch.setattr("graphed.SIZES", sizes_for(rows))
    monkeypatch.setattr("graphed.LANES", lanes_for(rows))
    use_graphs(monkeypatch)
    engine = build_engine(config)
    engine.close()
    spec = engine.model.spec
    config = replace(config, max_model_len=engine.resolved.max_model_len)
    sizes = _step_sizes(config, spec, (4, 0), halves=False)
    blocks = sum(size for size, dtype in taken if dtype is torch.uint8)
    assert bool(blocks) == config.attends_on_host
    assert sum(size for size, _ in taken) - blocks == pinned_bytes(spec, 4, sizes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_an_error_and_auto_does_without():
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU, but torch finds none"):
        LLM.in_process("builtin", device="cuda")
    with pytest.raises(ConfigError, match="for each of 2 ranks, but torch finds none"):
        LLM.in_process("builtin", device="cuda", tensor_parallel=2)
    with packaged(device="auto") as llm:
        assert llm.engine.served.device == "cpu"


# -- the host's memory beside the device's ------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix_caching", "kv_dtype", "kv_memory"),
    [
        (True, "int8", "500KiB"),
        (False, "auto", "900KiB"),
        pytest.param(True, "auto", "900KiB", marks=deep),
        pytest.param(False, "int8", "500KiB", marks=deep),
    ],
)
def test_sequences_that_give_way_go_on_where_they_were(
    prefix_caching, kv_dtype, kv_memory, monkeypatch
):
    """With the device's blocks all taken, KV comes back from the host bit for bit."""
    crowd = [prompt(40 + i % 5, i) for i in range(12)]
    common = {"kv_dtype": kv_dtype, "prefix_caching": prefix_caching, "max_model_len": 128}
    with packaged(**common) as llm:
        wanted = [r.token_ids for r in llm.generate(crowd, DRAWN, progress=False)]
    use_graphs(monkeypatch)
    tight = {"kv_memory": kv_memory, "host_kv_memory": "8MiB"}
    fewest, moves, totals = answer_by_moving(monkeypatch, crowd, wanted, **common, **tight)
    assert min(fewest) == 0, "the device was never full"
    # Who has just come back is computed again if it must give way before its move is committed.
    assert totals.preemptions < len(moves) / 4, "KV was computed again"


def test_targets_are_served_beside_memory_of_the_host(monkeypatch, tmp_path):
    """Any policy goes with any memory: answers of scheduler slo, while KV goes and comes back."""
    crowd = [prompt(40 + i % 5, i) for i in range(12)]
    with packaged(max_model_len=128) as llm:
        wanted = [r.token_ids for r in llm.generate(crowd, DRAWN, progress=False)]
    use_graphs(monkeypatch)
    common = {"scheduler": "slo", "profile": str(tmp_path / "profile.json"), "max_model_len": 128}
    common |= {"kv_memory": "900KiB", "host_kv_memory": "8MiB", "slo_admission": "off"}
    given = {"dtype": "bfloat16", "threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 96}
    config = EngineConfig(**given, **common)
    steps = Curve((1, 1024), (0.001, 0.002))
    key = profile_key(config, find_model(config))
    fitted = Fitted(key, 4, steps, dict.fromkeys(FEATURES, 0.0))  # without moves
    fitted.save(tmp_path / "profile.json")
    answer_by_moving(monkeypatch, crowd, wanted, **common)


def answer_by_moving(monkeypatch, crowd, wanted, **settings):
    """Serve with little memory: the answers are those that are wanted, and KV goes both ways.

    Returns the free blocks of the device in each step, the moves, and the scheduler's totals.
    """
    with packaged(**settings) as llm:
        built = llm.engine.built
        built.scheduler.memory.watermark_tokens = 0  # who fits now may begin, so many must give way
        fewest, moves = watch_tiers(monkeypatch, built)
        found = [r.token_ids for r in llm.generate(crowd, DRAWN, progress=False)]
        built.scheduler.check()
    assert found == wanted
    assert {move.to for move in moves} == set(Tier)
    return fewest, moves, built.scheduler.totals


def watch_tiers(monkeypatch, built):
    """Free blocks of the device in each step, and every move between the tiers."""
    fewest: list[int] = []
    moves: list[KVMove] = []
    launch = built.executor.launch

    def watched(plan):
        fewest.append(built.scheduler.cache.pools[0].available)
        moves.extend(plan.moves)
        return launch(plan)

    monkeypatch.setattr(built.executor, "launch", watched)
    return fewest, moves


def test_memory_of_the_host_holds_a_block():
    with pytest.raises(ConfigError, match="not even one block"):
        packaged(host_kv_memory=1024)
