"""Tickets, the loop's refusals, class order, and how open settings are decided."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from weft.core.config import EngineConfig
from weft.core.errors import ConfigError, InvariantError, OutOfMemoryError, ParameterError, suggest
from weft.core.plan import StepOutputs
from weft.core.resolved import DEVICE_KV_SHARE, Facts, GroupFacts, largest_context, resolve
from weft.core.settings import format_bytes, parse_bytes, settings_of
from weft.core.types import FinishReason, Request, SamplingParams
from weft.engine.loop import EngineLoop
from weft.kv.cache import GroupSpec, KVCache
from weft.sched.admission import LOOK_UPS_A_STEP
from weft.sched.registry import fcfs
from weft.sched.scheduler import Limits, Scheduler
from weft.sim.clock import VirtualClock
from weft.sim.executor import ModelledExecutor, next_token

GROUP = GroupSpec("full", 4, 64)
MIB, GIB = 2**20, 2**30


def scheduler(rows: int = 2, budget: int = 16, blocks: int = 64) -> Scheduler:
    group = GroupSpec("full", 4, blocks)
    return fcfs(KVCache([group]), Limits(rows, budget, 64))


def request(
    number: int, length: int = 5, service_class: str = "interactive", **sampling
) -> Request:
    prompt = tuple((number * 17 + i) % 50 for i in range(length))
    params = SamplingParams(**{"max_tokens": 4, **sampling})
    return Request(number, prompt, params, service_class=service_class)


class ListInbox:
    def __init__(self, requests):
        self.requests, self.outputs = list(requests), []

    def computing(self, sequence_ids):
        """Nothing here outlives an engine."""

    def receive(self):
        requests, self.requests = self.requests, []
        return requests, []

    def lend(self, lease):
        lease.grant(None)

    def publish(self, outputs: StepOutputs):
        self.outputs += [*outputs.tokens, *outputs.updates]


def test_a_ticket_is_collected_exactly_once():
    s = scheduler()
    s.add(request(1))
    executor = ModelledExecutor([GROUP], 50)
    ticket = executor.launch(s.plan(0.0))
    ticket.result()
    with pytest.raises(InvariantError, match="twice"):
        ticket.result()


def test_a_step_that_was_never_collected_is_found():
    s = scheduler()
    s.add(request(1))
    executor = ModelledExecutor([GROUP], 50)
    executor.launch(s.plan(0.0))
    with pytest.raises(InvariantError, match="never collected"):
        executor.close()


def test_steps_are_committed_in_order():
    s = scheduler()
    s.add(request(1))
    executor = ModelledExecutor([GROUP], 50, depth=1)
    first = executor.launch(s.plan(0.0))
    second = executor.launch(s.plan(0.0))
    first_result = first.result()
    with pytest.raises(InvariantError, match="expected"):
        s.commit(second.result())
    assert first_result.step_id == 1


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (Request(1, (), SamplingParams()), ParameterError),
        (Request(1, (1,) * 64, SamplingParams()), ParameterError),
        (request(1, service_class="gold"), ParameterError),
    ],
)
def test_the_loop_answers_what_the_scheduler_refuses(bad, error):
    inbox = ListInbox([bad, request(2)])
    loop = EngineLoop(scheduler(), ModelledExecutor([GROUP], 50), inbox, VirtualClock())
    loop.run_until_idle()
    (refusal,) = [n for n in inbox.outputs if n[0] == 1]
    assert refusal.finish is FinishReason.ERROR
    assert isinstance(refusal.error, error)
    assert [n for n in inbox.outputs if n[0] == 2]


def test_a_step_is_not_leased_when_one_of_its_sequences_has_just_ended():
    """It was launched before; what a lease gave after it would be tokens of nobody."""
    first = next_token(request(1).prompt, [GROUP], 50)
    ends = request(1, stop_token_ids=(first,), max_tokens=40)
    inbox = ListInbox([ends, request(2, max_tokens=40)])
    s = fcfs(KVCache([GROUP]), Limits(2, 16, 64, lease_steps=8))
    executor = ModelledExecutor([GROUP], 50, depth=1, leases=lambda steps: steps)
    launch, granted = executor.launch, {}

    def watched(plan):
        ticket = launch(plan)
        if ticket.lease is not None:
            granted[plan.step_id] = ticket.lease
        return ticket

    executor.launch = watched
    EngineLoop(s, executor, inbox, VirtualClock()).run_until_idle()
    assert not granted[2].granted
    assert all(lease.granted for step, lease in granted.items() if step > 2)


def test_a_request_that_can_never_fit_is_refused():
    s = scheduler(blocks=3)
    with pytest.raises(OutOfMemoryError, match="12"):
        s.add(request(1, length=10))
    s.add(request(2, length=8))


def test_a_higher_class_goes_first_and_takes_a_row():
    s = scheduler(rows=2)
    executor = ModelledExecutor([GROUP], 50)
    for number in (1, 2):
        s.add(request(number, service_class="batch", max_tokens=30))
    s.commit(executor.launch(s.plan(0.0)).result())
    s.add(request(3, service_class="priority"))
    s.add(request(4, service_class="batch"))
    plan = s.plan(0.0)
    assert [add.sequence_id for add in plan.add] == [3]
    assert s.totals.preemptions == 1
    s.commit(executor.launch(plan).result())
    s.check()


def test_a_batch_prompt_does_not_stand_before_a_priority_request():
    s = scheduler(rows=2, budget=8, blocks=64)
    executor = ModelledExecutor([GROUP], 50)
    s.add(request(1, length=50, service_class="batch"))
    s.commit(executor.launch(s.plan(0.0)).result())
    s.add(request(2, length=6, service_class="priority"))
    plan = s.plan(0.0)
    assert plan.add[0].sequence_id == 2
    assert plan.batches[0].counts == (6, 2)  # the batch prompt gets what is left


def test_a_full_token_budget_of_batch_work_gives_way():
    s = scheduler(rows=2, budget=2)
    executor = ModelledExecutor([GROUP], 50)
    for number in (1, 2):
        s.add(request(number, length=1, service_class="batch", max_tokens=40))
    s.commit(executor.launch(s.plan(0.0)).result())
    s.add(request(3, length=1, service_class="priority"))
    plan = s.plan(0.0)
    assert [add.sequence_id for add in plan.add] == [3]
    assert plan.num_tokens == 2


def test_nobody_is_preempted_in_vain():
    """All lower classes together could not make the request fit: they go on."""
    s = scheduler(rows=4, budget=64, blocks=16)
    executor = ModelledExecutor([GroupSpec("full", 4, 16)], 50)
    s.add(request(1, length=40, service_class="priority", max_tokens=4))
    s.add(request(2, length=8, service_class="batch", max_tokens=8))
    s.commit(executor.launch(s.plan(0.0)).result())
    s.add(request(3, length=40, service_class="priority"))
    assert s.plan(0.0).batches[0].counts == (1, 1)
    assert s.totals.preemptions == 0


def test_a_follower_takes_no_row_while_it_waits():
    s = scheduler(rows=2, budget=8)
    executor = ModelledExecutor([GROUP], 50)
    prompt = tuple(range(30))
    s.add(Request(1, prompt, SamplingParams(max_tokens=3), service_class="interactive"))
    s.add(request(2, length=2, service_class="batch", max_tokens=20))
    s.commit(executor.launch(s.plan(0.0)).result())
    s.add(Request(3, prompt, SamplingParams(max_tokens=3), service_class="interactive"))
    s.plan(0.0)
    assert s.totals.preemptions == 0


def test_nobody_waits_for_a_lower_class():
    s = scheduler(rows=4, budget=8)
    executor = ModelledExecutor([GROUP], 50)
    prompt = tuple(range(30))
    s.add(Request(1, prompt, SamplingParams(max_tokens=3), service_class="batch"))
    s.commit(executor.launch(s.plan(0.0)).result())
    s.add(Request(2, prompt, SamplingParams(max_tokens=3), service_class="priority"))
    assert s.plan(0.0).add[0].sequence_id == 2


def test_one_step_looks_up_a_bounded_number_of_prompts():
    s = scheduler(rows=4, budget=64, blocks=64)
    prompt = tuple(range(30))
    for number in range(LOOK_UPS_A_STEP * 3):
        s.add(Request(number, (*prompt, number % 50), SamplingParams(max_tokens=3)))
    s.plan(0.0)
    hashed = sum(bool(chains[4].block_hashes) for chains in s.cache._chains.values())
    assert hashed == LOOK_UPS_A_STEP


def test_a_hit_in_a_small_sliding_group_counts_as_held():
    """A sequence that finds its window in the cache needs that much less of an almost full pool."""
    window = GroupSpec("sliding", 4, 6, window=8)
    cache = KVCache([GroupSpec("full", 4, 64), window])
    s = fcfs(cache, Limits(1, 16, 128))
    executor = ModelledExecutor(cache.groups, 50)
    prompt = tuple(i % 50 for i in range(16))
    inbox = ListInbox([Request(1, prompt, SamplingParams(max_tokens=2))])
    loop = EngineLoop(s, executor, inbox, VirtualClock())
    loop.run_until_idle()
    inbox.requests = [Request(2, (*prompt, *prompt[::-1] * 4), SamplingParams(max_tokens=2))]
    loop.run_until_idle()
    assert s.idle
    assert [n for n in inbox.outputs if n[0] == 2]


def test_equals_are_not_preempted_for_a_row():
    s = scheduler(rows=1)
    executor = ModelledExecutor([GROUP], 50)
    s.add(request(1, max_tokens=20))
    s.commit(executor.launch(s.plan(0.0)).result())
    s.add(request(2))
    assert s.plan(0.0).add == ()
    assert s.totals.preemptions == 0


def test_single_tokens_come_before_chunks():
    s = scheduler(rows=4, budget=8)
    executor = ModelledExecutor([GROUP], 50)
    s.add(request(1, length=4, max_tokens=20))
    s.commit(executor.launch(s.plan(0.0)).result())
    s.add(request(2, length=30))
    for expected in ((1, 7), (1, 7), (1, 7), (1, 7)):
        plan = s.plan(0.0)
        assert plan.batches[0].counts == expected
        assert plan.num_tokens <= 8
        s.commit(executor.launch(plan).result())


def test_equal_prompts_in_flight_compute_the_shared_part_once():
    s = scheduler(rows=4, budget=64)
    executor = ModelledExecutor([GROUP], 50)
    prompt = tuple(range(20))
    for number in range(3):
        s.add(Request(number, (*prompt, 30 + number), SamplingParams(max_tokens=3)))
    first = s.plan(0.0)
    assert first.batches[0].counts == (21,)
    s.commit(executor.launch(first).result())
    second = s.plan(0.0)
    assert second.batches[0].counts == (1, 1, 1)  # one decodes; two have only their own token left
    s.commit(executor.launch(second).result())
    s.check()


def test_an_end_says_when_its_sequence_began_and_when_its_prompt_was_computed():
    s = scheduler(rows=1, budget=8)
    executor = ModelledExecutor([GROUP], 50)
    s.add(request(1, length=18, max_tokens=2))  # chunks of 8, 8 and 2 tokens
    s.add(request(2, length=5, max_tokens=1))
    ends = {}
    for second in range(1, 20):
        plan = s.plan(float(second))
        if plan is None:
            break
        outputs = s.commit(executor.launch(plan).result(), second + 0.5)
        ends |= {u.sequence_id: u for u in outputs.updates if u.finish is not None}
    assert (ends[1].scheduled_ns, ends[1].prefilled_ns) == (1 * 10**9, 35 * 10**8)
    assert (ends[2].scheduled_ns, ends[2].prefilled_ns) == (5 * 10**9, 55 * 10**8)
    s.add(request(3))
    (end,) = s.cancel(3, FinishReason.CANCELLED)
    assert (end.scheduled_ns, end.prefilled_ns) == (0, 0)


def facts(available: int, *groups: GroupFacts, weights: int = GIB, positions: int = 8192) -> Facts:
    return Facts(positions, weights, available, groups or (GroupFacts("full", None, 1024),))


def test_open_settings_are_decided_and_closed_ones_kept():
    resolved = resolve(EngineConfig(max_num_seqs=4), facts(4 * GIB))
    assert resolved.max_model_len == 8192
    assert resolved.kv_bytes <= 1.5 * GIB
    assert not resolved.limited_by_memory
    assert resolve(EngineConfig(max_model_len=100), facts(4 * GIB)).max_model_len == 100


def test_memory_limits_an_open_length_and_refuses_a_closed_one():
    config = EngineConfig(kv_memory="1MiB")
    resolved = resolve(config, facts(4 * GIB))
    assert (resolved.max_model_len, resolved.limited_by_memory) == (1024, True)
    assert largest_context(config, facts(4 * GIB)) == 1024
    with pytest.raises(OutOfMemoryError, match="enough for 1024 tokens"):
        resolve(EngineConfig(kv_memory="1MiB", max_model_len=2000), facts(4 * GIB))
    with pytest.raises(OutOfMemoryError, match="too few"):
        resolve(EngineConfig(), facts(GIB // 2))
    assert largest_context(EngineConfig(), facts(GIB // 2)) == 0
    with pytest.raises(ConfigError, match="8192"):
        resolve(EngineConfig(max_model_len=9000), facts(4 * GIB))


def test_what_steps_need_on_a_device_is_not_for_the_kv():
    device = replace(facts(4 * GIB), workspace_bytes=GIB, kv_share=DEVICE_KV_SHARE)
    config = EngineConfig(max_num_seqs=1000)
    left = device.available_bytes - device.weight_bytes - GIB
    assert resolve(config, device).kv_memory == int(left * DEVICE_KV_SHARE)
    assert resolve(replace(config, kv_memory=left), device).kv_memory == left
    with pytest.raises(OutOfMemoryError, match=r"beside weights and steps only .* are free"):
        resolve(replace(config, kv_memory=left + 1), device)
    with pytest.raises(OutOfMemoryError, match=r"the steps 3.00 GiB, but only 4.00 GiB .* too few"):
        resolve(config, replace(device, workspace_bytes=3 * GIB))


@pytest.mark.parametrize("available", [1.02, 1.1, 1.5, 3, 30])
def test_the_split_over_groups_stays_within_the_budget(available):
    groups = (GroupFacts("full", None, 2000), GroupFacts("sliding", 512, 10_000))
    config = EngineConfig(max_num_batched_tokens=256)
    f = facts(int(available * GIB), *groups, positions=131_072)
    resolved = resolve(config, f)
    assert resolved.kv_bytes <= (available - 1) * GIB / 2
    assert resolved.max_model_len <= resolved.group_blocks[0] * 16
    window_blocks = (512 + 256) // 16 + 2
    assert resolved.group_blocks[1] <= window_blocks * config.max_num_seqs
    assert min(resolved.group_blocks[1], resolved.group_blocks[0]) * 16 >= min(
        resolved.max_model_len, 512 + 32
    )


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("512MiB", 512 * MIB),
        ("8GB", 8 * 10**9),
        ("1.5g", 1_500_000_000),
        ("77", 77),
        ("2KiB", 2048),
    ],
)
def test_sizes(text, count):
    assert parse_bytes(text) == count
    assert EngineConfig(kv_memory=max(count, 1024)).kv_memory == max(count, 1024)


def test_sizes_in_words():
    assert format_bytes(1536 * MIB) == "1.50 GiB"
    with pytest.raises(ParameterError, match="512MiB"):
        parse_bytes("many")


def test_classes_are_changed_and_extended():
    config = EngineConfig(
        classes={"gold": {"priority": 0, "ttft_s": 0.5}, "batch": {"priority": 9}}
    )
    table = {row.name: row for row in config.service_classes()}
    assert table["gold"].ttft_s == 0.5
    assert table["batch"].priority == 9
    for bad in (
        {"x": {}},
        {"x": 3},
        {"x": {"priority": -1}},
        {"x": {"priority": 0, "ttft_s": "soon"}},
    ):
        with pytest.raises(ConfigError, match="classes"):
            EngineConfig(classes=bad)


def test_an_unknown_setting_suggests_the_nearest():
    with pytest.raises(ConfigError, match="'max_model_len'"):
        EngineConfig.from_mapping({"max_model_length": 4})


def test_a_setting_that_was_renamed_says_its_new_name():
    for old, new in (("attention", "kernels"), ("batch_invariant", "require_batch_invariance")):
        with pytest.raises(ConfigError, match=f"'{old}'. It is called '{new}' now"):
            EngineConfig.from_mapping({old: "cpu"})
    assert suggest("--attention", ["--kernels"]) == " It is called '--kernels' now."
    assert suggest("attention", ["attentive"]) == " Did you mean 'attentive'?"


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": float("nan")}, {"temperature": -0.1}, {"temperature": True},
        {"top_p": 0}, {"top_p": 1.1}, {"top_k": -2}, {"top_k": 1.5}, {"min_p": float("inf")},
        {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": 2, "min_tokens": 3},
        {"repetition_penalty": 0}, {"presence_penalty": 2.1}, {"frequency_penalty": None},
        {"seed": -1}, {"seed": 2**63}, {"logprobs": 21}, {"prompt_logprobs": -1},
        {"stop": [""]}, {"stop": ["x"] * 17}, {"stop": [3]}, {"stop": "x" * 600},
        {"stop_token_ids": [1.0]}, {"stop_token_ids": [-1]}, {"stop_token_ids": list(range(200))},
        {"logit_bias": {1: 101}}, {"logit_bias": {-1: 1}}, {"logit_bias": {1: float("nan")}},
        {"logit_bias": dict.fromkeys(range(2000), 1.0)}, {"logit_bias": [1]}, {"ignore_eos": 1},
        {"max_tokens": 10**400}, {"temperature": 10**400}, {"top_k": -(10**400)},
        {"max_tokens": 10**5000}, {"stop_token_ids": [10**5000]}, {"logit_bias": {1: 10**400}},
        {"seed": np.bool_(True)}, {"max_tokens": np.float64(3)}, {"temperature": np.float32("nan")},
        {"top_p": Fraction(10**400)}, {"stop_token_ids": [np.bool_(True)]},
    ],
)  # fmt: skip
def test_parameters_out_of_bounds_are_refused_by_name(changes):
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**changes)
    assert caught.value.param in changes
    assert caught.value.param in caught.value.message.replace("stop string", "stop")
    assert len(caught.value.message) < 250


def test_numbers_of_numpy_become_pythons_own():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_p=np.float64(0.25),
        top_k=np.int64(7),
        seed=np.uint64(9),
        stop_token_ids=[np.int32(3)],
        logit_bias={np.int64(4): np.float32(1.5)},
        min_p=Fraction(1, 4),
    )
    values = [params.temperature, params.top_p, params.top_k, params.seed, params.min_p]
    assert values == [0.5, 0.25, 7, 9, 0.25]
    assert [type(value) for value in values] == [float, float, int, int, float]
    assert [type(token) for token in params.stop_token_ids] == [int]
    assert [(type(k), type(v)) for k, v in params.logit_bias.items()] == [(int, float)]
    assert type(EngineConfig(max_model_len=np.int16(64)).max_model_len) is int


@pytest.mark.parametrize(
    "value", [10**400, "9" * 400, "9" * 400 + "GB", 2**63], ids=["int", "text", "unit", "bits"]
)
def test_sizes_without_end_are_refused(value):
    with pytest.raises(ConfigError):
        EngineConfig(kv_memory=value)


def test_the_cache_of_packed_weights_is_a_size_or_off():
    assert EngineConfig().packed_cache == 20 * GIB
    assert EngineConfig(packed_cache="1GiB").packed_cache == GIB
    for word in ("off", False, 0):  # YAML makes False of the word
        assert EngineConfig(packed_cache=word).packed_cache == 0
    for wrong in ("never", True, -1):
        with pytest.raises(ConfigError, match=r"packed_cache|not a size") as raised:
            EngineConfig(packed_cache=wrong)
        assert "size" in raised.value.message
    with pytest.raises(ConfigError, match="kv_memory"):
        EngineConfig(kv_memory=False)


def test_kv_memory_may_be_left_to_the_engine_by_a_word():
    assert EngineConfig(kv_memory="auto") == EngineConfig()
    assert settings_of(EngineConfig)["kv_memory"].parse("auto") is None
    with pytest.raises(ConfigError, match="'auto' is not a size"):
        EngineConfig(host_kv_memory="auto")
