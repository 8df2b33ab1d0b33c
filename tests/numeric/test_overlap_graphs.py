"""Two sub-batches that overlap with attention on the host, in captured steps: the tokens of the
device alone.

The device is the host, and a captured function sees nothing but what was uploaded. Courier and host
worker are real threads.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from checkpoints import prompt
from graphed import use_graphs
from test_overlap import (
    DEVICE,
    FAMILIES,
    GREEDY,
    HOST,
    Dawdling,
    Late,
    assert_same_as_ample,
    folders,  # noqa: F401
    host,  # noqa: F401
    of,
    overlapping,
    settings_for,
    steps,  # noqa: F401
    test_a_host_without_worker_ends_the_engine_with_a_typed_error,  # noqa: F401
    test_a_job_that_fails_ends_its_row_alone,  # noqa: F401
    test_a_prompt_on_the_host_is_scored_like_one_on_the_device,  # noqa: F401
    test_a_row_leaves_for_the_host_with_the_token_of_its_last_step_there,  # noqa: F401
    test_more_than_two_sub_batches_are_refused,  # noqa: F401
    test_tokens_come_in_the_order_of_the_plan_whatever_the_tiers,  # noqa: F401
    tokens,  # noqa: F401
)
from test_piggybacked_rows import Idler, Steps

from depth import deep
from weft.core.config import EngineConfig
from weft.core.errors import ConfigError, HostWorkerError, InvariantError
from weft.core.plan import RowAdd, SubBatch, Tier
from weft.core.types import SamplingParams
from weft.engine.host_rules import check_attends_on_host
from weft.engine.model import find_model
from weft.exec import courier, host_attention, host_prompts, overlap_pass
from weft.exec.courier import Courier
from weft.exec.device import HostDevice
from weft.exec.graphs import GraphExecutor
from weft.exec.overlap_pass import OverlappedPass, _DeviceLane
from weft.exec.overlapped_rows import OverlappedRows
from weft.exec.step_layout import PairSizes
from weft.exec.workspace import StepSizes, workspace_bytes
from weft.models.decoder import Decoder


@pytest.fixture(autouse=True)
def _graphs(monkeypatch):
    use_graphs(monkeypatch)


def count_passes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count passes by who waits for the host; captures are passes as well."""
    found, run, begin = Counter[str](), OverlappedPass.run, OverlappedRows.begin

    def running(self, serial, batches, wait=None):
        found["device" if wait is None else "host"] += 1
        return run(self, serial, batches, wait)

    def beginning(self, hosted):
        found["steps"] += 1
        begin(self, hosted)

    monkeypatch.setattr(OverlappedPass, "run", running)
    monkeypatch.setattr(OverlappedRows, "begin", beginning)
    return found


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=deep), pytest.param(3, marks=deep)])
@pytest.mark.parametrize(
    ("family", "host"),
    [*((name, None) for name in FAMILIES), ("gemma3", Dawdling), ("llama-gqa", Late)],
    indirect=["host"],
)
def test_overlap_changes_no_token(folders, family, seed, monkeypatch) -> None:  # noqa: F811
    """Prefixes, equal prompts, drafts, cancels, and hosts of any speed; with sequences of the host
    alone in captured steps, and others in those with its prompts.
    """
    passes = count_passes(monkeypatch)
    kinds = assert_same_as_ample(folders[family], FAMILIES[family], seed, monkeypatch)
    assert min(kinds[kind] for kind in ("one", "two", "mixed", "prompt", "comes back")) > 5
    assert passes["host"] > 5
    assert passes["steps"] - passes["host"] > 20


@pytest.mark.parametrize("family", ["llama-gqa", "gemma3"])
def test_nor_does_it_uncaptured(folders, family, monkeypatch) -> None:  # noqa: F811
    passes = count_passes(monkeypatch)
    assert_same_as_ample(folders[family], {**FAMILIES[family], "graphs": False}, 1, monkeypatch)
    assert passes["device"] == 0


def test_prompts_of_the_host_take_turns_in_the_scratch_store(folders, monkeypatch) -> None:  # noqa: F811
    """With room for one of them at a time."""
    pieces, found = host_prompts.HostPrompts.pieces, []

    def watched(self, first, batch):
        self.most_blocks = 1
        found.append(pieces(self, first, batch))
        return found[-1]

    monkeypatch.setattr(host_prompts.HostPrompts, "pieces", watched)
    assert_same_as_ample(folders["gemma3"], FAMILIES["gemma3"], 1, monkeypatch)
    assert max(map(len, found)) > 1


def test_what_the_host_does_of_rows_finds_them_in_any_sub_batch(folders) -> None:  # noqa: F811
    """An embedding, a choice of few tokens and log probabilities of a prompt, behind padding."""
    few = replace(GREEDY, seed=0, allowed_token_ids=(70, 71, 72))
    scored = replace(GREEDY, seed=0, prompt_logprobs=1)

    def found(config: EngineConfig, tier: Tier) -> Any:
        with Steps(config) as opened:
            for row in range(3):
                opened.start(row)

            def add(row: int, sampling: SamplingParams, **more: Any) -> RowAdd:
                given, tables = tuple(prompt(20, row)), (opened.BLOCKS[row],) * opened._groups
                more["tier"] = tier
                return RowAdd(row, row, given, 20, sampling, frozenset(), tables, **more)

            given = replace(GREEDY, seed=0)
            fresh = (add(1, few), add(2, scored), add(3, given, embed=True))
            tiers = [(DEVICE, HOST), (HOST, HOST)] if tier is HOST else [(), ()]
            mine = SubBatch((0, 1), (20, 0), (1, 20), (True, True), tiers[0])
            prompts = SubBatch((3, 2), (0, 0), (20, 7), (True, False), tiers[1])
            done = opened.run(mine, prompts, drop=(1, 2), add=fresh)
            return done.sequence_ids, done.tokens, done.embeddings, done.prompt_logprobs

    on_host = found(overlapping(folders["llama-gqa"]), HOST)
    assert on_host == found(settings_for(folders["llama-gqa"]), DEVICE)
    assert (on_host[0], set(on_host[2]), set(on_host[3])) == ((0, 1, 3), {3}, {2})
    assert on_host[1][1] in (70, 71, 72)


def test_a_device_waits_for_nothing_that_has_not_left(steps, tokens, monkeypatch) -> None:  # noqa: F811
    """A fork that it had not awaited might never run beside a kernel that waits for its answer."""
    forked, waits = [False], [0]
    fork = HostDevice.fork
    monkeypatch.setattr(HostDevice, "fork", lambda self: forked.__setitem__(0, True) or fork(self))
    monkeypatch.setattr(HostDevice, "rejoin", lambda _: forked.__setitem__(0, False))
    decoder = steps.executor._decoder
    ops, wait = decoder.ops, decoder.ops.lanes.wait

    def waiting(*given: Any) -> None:
        assert not forked[0]
        waits[0] += 1
        wait(*given)

    monkeypatch.setattr(decoder, "ops", replace(ops, lanes=replace(ops.lanes, wait=waiting)))
    done = steps.run(of(steps.decode(0, 2), DEVICE, HOST), of(steps.decode(1, 3), DEVICE, HOST))
    assert [tokens[0][row] for row in (0, 2, 1, 3)] == list(done.tokens)
    assert waits[0] == 2 * steps.layers


# -- memory that runs out, and hosts that fail ----------------------------------------------------


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("family", ["llama-gqa", "gemma3"])
def test_a_step_that_runs_out_of_memory_loses_no_row(folders, family, graphs, monkeypatch) -> None:  # noqa: F811
    """Anywhere between the layers: rows of either tier are computed one by one then."""
    draw, ran_out, together = random.Random(5), Counter[str](), [0]
    run = GraphExecutor._run_overlapped

    def counting(self, batches, *given):
        together[0] = sum(len(batch.rows) for batch in batches)
        try:
            return run(self, batches, *given)
        finally:
            together[0] = 0

    def starving(owner: type, name: str, share: float) -> None:
        method = getattr(owner, name)

        def call(self, *given: Any) -> Any:
            done = method(self, *given)
            if together[0] > 1 and draw.random() < share:
                ran_out[name] += 1
                raise MemoryError
            return done

        monkeypatch.setattr(owner, name, call)

    monkeypatch.setattr(GraphExecutor, "_run_overlapped", counting)
    for name, share in {"enter": 0.03, "leave": 0.03, "end": 0.1}.items():
        starving(_DeviceLane, name, share)
    for name in ("embed", "logits"):
        starving(Decoder, name, 0.05)
    more = {**FAMILIES[family], "graphs": graphs}
    assert_same_as_ample(folders[family], more, 1, monkeypatch)
    assert min(ran_out[name] for name in ("enter", "leave", "end", "embed", "logits")) > 0


def test_a_row_that_finds_no_memory_alone_ends_alone(steps, tokens, monkeypatch) -> None:  # noqa: F811
    send = _DeviceLane._send

    def starving(lane: _DeviceLane, layer: int, *qkv: Any) -> None:
        send(lane, layer, *qkv)
        if layer == 1 and 2 in lane._batch.hosted:
            raise MemoryError

    monkeypatch.setattr(_DeviceLane, "_send", starving)
    done = steps.run(of(steps.decode(0, 2), DEVICE, HOST), of(steps.decode(3), HOST))
    assert [done.tokens[0], done.tokens[2]] == [tokens[0][0], tokens[0][3]]
    assert [(row, error.code) for row, error in done.faults.items()] == [(2, "out_of_memory")]
    assert set(steps.mailbox.states()) == {"empty"}


@pytest.fixture
def idle(folders):  # noqa: F811
    """Steps of an engine whose host never attends, with rows 1 and 2 there after their prompts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_attention, "HostWorker", Idler)
        opened = Steps(overlapping(folders["llama-gqa"]))
    with opened as opened_steps:
        for row in range(3):
            opened_steps.start(row)
        opened_steps.run(moves=opened_steps.away(1, 2))
        yield opened_steps


@pytest.mark.parametrize("captured", [True, False])
def test_a_host_that_does_not_attend_in_time_is_a_typed_error(idle, captured, monkeypatch) -> None:
    monkeypatch.setattr(courier, "ANSWER_S", 0.3)
    if not captured:
        idle.executor._steps.overlapped_graphs.clear()
    with pytest.raises(HostWorkerError, match=r"has not attended within 0 s\."):
        idle.run(of(idle.decode(0, 1), DEVICE, HOST), of(idle.decode(2), HOST))
    with pytest.raises(HostWorkerError, match="has not attended"):
        idle.run(of(idle.decode(0, 1), DEVICE, HOST))


def test_a_device_does_not_wait_for_ever(idle, monkeypatch) -> None:
    """Not even if the courier is gone as well."""
    monkeypatch.setattr(overlap_pass, "MOST_LOOKS", 100)
    monkeypatch.setattr(Courier, "pump", lambda _: False)
    with pytest.raises(HostWorkerError, match="has not attended to the rows of a step in time"):
        idle.run(of(idle.decode(1), HOST))


def test_a_courier_that_fails_ends_the_wait(idle, monkeypatch) -> None:
    def failing(*_: object) -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(Courier, "pump", failing)
    with pytest.raises(HostWorkerError, match="The courier has ended: an illegal memory"):
        idle.run(of(idle.decode(1), HOST))


# -- sizes and memory -----------------------------------------------------------------------------


def test_a_few_pairs_of_sizes_are_captured() -> None:
    pairs = PairSizes.up_to(2048)
    assert (len(pairs.first), len(pairs.second)) == (12, 4)
    assert pairs.padded((512, 512)) == (512, 512)
    assert pairs.padded((pairs.first[3] + 1, 0)) == (pairs.first[4], 0)
    assert pairs.padded((1,)) == (pairs.first[0], 0)
    assert pairs.padded((513, 1)) is pairs.padded((1, 513)) is None
    assert PairSizes.up_to(3) == PairSizes((1, 2, 4), (0, 1, 2, 4))


def test_a_graph_of_other_sizes_in_the_place_of_one_is_found(steps, monkeypatch) -> None:  # noqa: F811
    graphs = steps.executor._steps.overlapped_graphs
    monkeypatch.setitem(graphs, ((1, 1), 1), replace(graphs[(1, 1), 1], layout_hash=7))
    with pytest.raises(InvariantError, match="were read as if by"):
        steps.run(of(steps.decode(2), HOST), of(steps.decode(3), HOST))


def test_what_overlap_needs_is_known_before(steps) -> None:  # noqa: F811
    """What lies on the device all the time is counted."""
    executor, spec = steps.executor, steps.engine.model.spec
    overlap, staging = executor._functions.overlap, executor._overlapped.courier._staging
    scratch = [t for arrays in executor._prompts.scratch for t in arrays.arrays]
    held = [*vars(overlap.state).values(), overlap.gave_up, staging._results, staging._places]
    plain = StepSizes(48, len(executor._table.length), 8, [14])
    scratch_bytes = sum(tensor.nbytes for tensor in scratch)
    overlapped, without = (
        workspace_bytes(spec, 4, sizes, graphs=False)
        for sizes in (replace(plain, overlaps=True, scratch_bytes=scratch_bytes), plain)
    )
    hidden = 48 * spec.hidden_size * 4  # of the padding of a second sub-batch
    held_bytes = sum(tensor.nbytes for tensor in held) + scratch_bytes + hidden
    assert held_bytes <= overlapped - without


# -- what is refused ------------------------------------------------------------------------------


def test_what_overlapped_steps_of_a_gpu_cannot_do_is_refused(folders) -> None:  # noqa: F811
    config = overlapping(folders["llama-gqa"])
    model = find_model(config)
    named = replace(model.ops, names={**model.ops.names, "paged_attention": "triton"})
    check_attends_on_host(config, model.spec, named)
    with pytest.raises(ConfigError, match="not pinned for a GPU yet; turn host_process off"):
        check_attends_on_host(replace(config, host_process=True), model.spec, named)
