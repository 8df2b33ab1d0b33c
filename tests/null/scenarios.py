"""Scenarios on which plans of schedulers are recorded: traces, and traffic made for one matter.

All is drawn with integers of ``random.Random``, and times are multiples of a millisecond, so that a
scenario is the same on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count
from pathlib import Path

from costs import LinearCost

from shareddata import need
from weft.core.types import DEFAULT_CLASSES, Request, SamplingParams, ServiceClass
from weft.kv.cache import GroupSpec
from weft.sched.resources import DEFAULT_POLICY, TargetPolicy
from weft.sched.scheduler import Limits
from weft.workload.trace import Arrival, read_trace

HOST_ONLY = "host-only"  # load-aware with all KV on the host
ON_HOST = ("fcfs-swap", "load-aware", "slo-piggyback", HOST_ONLY)
EVERY = ("fcfs", "fcfs-swap", "load-aware", "slo", "slo-piggyback")
CLASSES = tuple(row.name for row in DEFAULT_CLASSES)
BATCH = (ServiceClass("flex", 2), ServiceClass("batch", 3))
TIGHT = (
    ServiceClass("priority", 0, ttft_s=0.6, tpot_s=0.04),
    ServiceClass("interactive", 1, ttft_s=2.0, tpot_s=0.15),
    *BATCH,
)
HARDLY = (  # so tight that a step holds a few tokens, and long prompts are late by themselves
    ServiceClass("priority", 0, ttft_s=0.08, tpot_s=0.014),
    ServiceClass("interactive", 1, ttft_s=1.0),
    *BATCH,
)
COST = LinearCost(
    0.01, 0.0005, context_s=2e-6, layers=4, host_context_s=1e-5, move_s=2e-5
)  # a step of 20 tokens takes twice as long as one of a single token
VOCAB = 97
LIMITS = Limits(8, 64, 160)

Arrivals = list[tuple[float, Request]]


@dataclass(frozen=True)
class Scenario:
    """A world, what it is asked, and the schedulers that are recorded in it.

    Attributes:
        arrivals: with their times in seconds.
        cancels: by round of the loop, requests to cancel.
        faults: (request, tokens that it knows) where its row is faulty.
        phrase: tokens that the text repeats, with a slip now and then; 0 for the modelled text.
        host_token_steps: steps that the host attends to a token of context, for piggybacked rows.
        watermark_tokens: of the scheduler, where it is not its own.
    """

    arrivals: Arrivals
    limits: Limits = LIMITS
    groups: tuple[GroupSpec, ...] = (GroupSpec("full", 4, 160),)
    host_blocks: tuple[int, ...] = (120,)
    depth: int = 1
    cancels: Mapping[int, Seq[int]] = field(default_factory=dict)
    faults: frozenset[tuple[int, int]] = frozenset()
    classes: Seq[ServiceClass] = DEFAULT_CLASSES
    policy: TargetPolicy = DEFAULT_POLICY
    prefix_caching: bool = True
    vocab: int = VOCAB
    phrase: int = 0
    cost: LinearCost = COST
    host_token_steps: float = 0.01
    schedulers: Seq[str] = EVERY
    watermark_tokens: int | None = None


def requests(
    draw: random.Random,
    number: int,
    *,
    every_ms: int,
    prompt: tuple[int, int],
    output: tuple[int, int],
    classes: Seq[str] = CLASSES,
    more: Callable[[random.Random, Request], Request] = lambda _, request: request,
) -> Arrivals:
    """So many requests, one every ``every_ms`` on average, with lengths between bounds.

    Args:
        more: changes a request.
    """
    found, at_ms = [], 0
    for index in range(number):
        tokens = tuple(draw.randrange(VOCAB) for _ in range(draw.randint(*prompt)))
        params = SamplingParams(max_tokens=draw.randint(*output))
        request = Request(index, tokens, params, (), draw.choice(classes))
        found.append((at_ms / 1000, more(draw, request)))
        at_ms += draw.randint(0, 2 * every_ms)
    return found


def _sampled(request: Request, **params) -> Request:
    return replace(request, sampling=replace(request.sampling, **params))


# -- traces ---------------------------------------------------------------------------------------


@cache
def _read(path: Path) -> list[Arrival]:
    return read_trace(str(path))


def trace(name: str, number: int, *, shorter: int, speed: int, **world) -> Scenario:
    """The first requests of a trace, with prompts and answers that many times shorter."""
    arrivals: Arrivals = []
    text = count(2**40)  # what nobody else has
    block = max(1, 512 // shorter)
    for index, arrival in enumerate(_read(need(name))[:number]):
        length = min(140, -(-arrival.input_tokens // shorter))
        prompt = [each * block + i for each in arrival.blocks for i in range(block)][:length]
        prompt += [next(text) for _ in range(length - len(prompt))]
        params = SamplingParams(max_tokens=min(100, -(-arrival.output_tokens // shorter)))
        service_class = ("interactive", "batch", "interactive", "flex", "priority")[index % 5]
        request = Request(index, tuple(prompt), params, (), service_class)
        arrivals.append((round(arrival.at_s * 1000 / speed) / 1000, request))
    return Scenario(arrivals, limits=Limits(16, 96, 256), **world)


CONVERSATION = partial(
    trace, "azure/AzureLLMInferenceTrace_conv.csv", shorter=8, speed=8,
    groups=(GroupSpec("full", 8, 90),), host_blocks=(120,),
)  # fmt: skip
CODE = partial(
    trace, "azure/AzureLLMInferenceTrace_code.csv", shorter=16, speed=12,
    groups=(GroupSpec("full", 8, 60),), host_blocks=(50,), policy=TargetPolicy("reject"), depth=0,
)  # fmt: skip
MOONCAKE = partial(
    trace, "mooncake/conversation_trace.jsonl", shorter=64, speed=12,
    groups=(GroupSpec("full", 8, 90),), host_blocks=(200,), policy=TargetPolicy("off"),
    classes=TIGHT,
)  # fmt: skip


# -- traffic made for one matter ------------------------------------------------------------------


def full_pool(depth: int) -> Scenario:
    """All ask at once, and three sequences fill the memory of the device."""
    draw = random.Random(f"full {depth}")
    return Scenario(
        requests(draw, 30, every_ms=2, prompt=(8, 60), output=(10, 60)),
        groups=(GroupSpec("full", 4, 60),),
        host_blocks=(60,),
        depth=depth,
        policy=TargetPolicy(patience_s=0.5),
    )


def mixed_classes(admission: str) -> Scenario:
    """Targets that the device can just keep, and best effort that has to wait for them."""
    draw = random.Random(f"classes {admission}")
    lengths = {"prompt": (10, 100), "output": (4, 40)}
    return Scenario(
        requests(draw, 70, every_ms=40, **lengths),
        limits=Limits(12, 80, 160),
        classes=TIGHT,
        policy=TargetPolicy(admission, 0.1, 0.3),
    )


def cancelled(depth: int) -> Scenario:
    """Every other request is cancelled: while it waits, computes, moves, or after its end."""
    draw = random.Random(f"cancels {depth}")
    cancels: dict[int, list[int]] = {}
    for number in range(0, 60, 2):
        cancels.setdefault(draw.randint(1, 400), []).append(number)
    return Scenario(
        requests(draw, 60, every_ms=20, prompt=(8, 60), output=(5, 50)),
        groups=(GroupSpec("full", 4, 70),),
        host_blocks=(100,),
        depth=depth,
        cancels=cancels,
        classes=TIGHT,
        policy=TargetPolicy("demote", 0.1, 1.0),
    )


def _guessed(draw: random.Random, request: Request) -> Request:
    """Text that goes on as it began, or nearly, with drafts of various lengths; some grammars."""
    kind = draw.randrange(6)
    if kind == 0:
        return _sampled(request, grammar="any: it only forbids drafts")
    if kind == 1:  # the modelled text of such a prompt is zeros only
        period = [VOCAB * (i + 1) for i in range(draw.randint(1, 5))]
        request = replace(request, prompt=tuple(period * 9)[: len(request.prompt) + 8])
    if kind == 2:
        request = replace(request, prompt=(0,) * len(request.prompt))
    if kind == 3:
        request = _sampled(request, stop_token_ids=(0,), min_tokens=request.sampling.max_tokens)
    return _sampled(request, speculation=draw.choice([None, None, 0, 1, 3, 16]))


def drafts(depth: int, vocab: int, phrase: int = 0, seed: int = 0) -> Scenario:
    draw = random.Random(f"drafts {depth} {vocab} {seed}")
    return Scenario(
        requests(draw, 40, every_ms=30, prompt=(6, 40), output=(20, 90), more=_guessed),
        limits=Limits(8, 64, 160, speculation=5),
        groups=(GroupSpec("full", 4, 120),),
        depth=depth,
        cancels={} if not phrase else {8 * number: [number] for number in range(5, 40, 2)},
        vocab=vocab,
        phrase=phrase,
    )


def long_text() -> Scenario:
    """A text that is longer than what drafts look at."""
    prompt = tuple(i * i % VOCAB for i in range(16_400))
    request = Request(0, prompt, SamplingParams(max_tokens=30, speculation=4))
    return Scenario(
        [(0.0, request)],
        limits=Limits(1, 4096, 17_000),
        groups=(GroupSpec("full", 64, 270),),
        host_blocks=(270,),
        phrase=4,
    )


def on_host(host_tokens: int, depth: int, host_token_steps: float) -> Scenario:
    """Little room on the device, and a host with more of it or less."""
    draw = random.Random(f"host {host_tokens} {depth}")
    return Scenario(
        requests(draw, 45, every_ms=15, prompt=(8, 70), output=(10, 70)),
        limits=Limits(16, 48, 160),
        groups=(GroupSpec("full", 4, 90),),
        host_blocks=(host_tokens // 4,),
        depth=depth,
        classes=TIGHT,
        policy=TargetPolicy("off", 0.1, 0.4),
        host_token_steps=host_token_steps,
        schedulers=ON_HOST,
    )


def tight_window(seed: int) -> Scenario:
    """What a sequence leaves behind on the device is less than what its next chunk needs."""
    draw = random.Random(f"window {seed}")

    def longer(draw: random.Random, request: Request) -> Request:
        return replace(request, prompt=request.prompt * draw.choice([1, 1, 13]))

    return Scenario(
        requests(draw, 30, every_ms=5, prompt=(1, 3), output=(2, 10), more=longer),
        limits=Limits(3, 8, 60),
        groups=(GroupSpec("sliding", 1, 8, window=6),),
        host_blocks=(60,),
        watermark_tokens=0,
    )


def long_piggybacks(seed: int) -> Scenario:
    """Two steps in flight, and hosts so full that those who just came have to go again."""
    draw = random.Random(f"rides {seed}")
    return Scenario(
        requests(draw, 40, every_ms=15, prompt=(4, 20), output=(10, 40)),
        limits=Limits(16, 48, 100),
        groups=(GroupSpec("full", 1, 100),),
        host_blocks=(60,),
        depth=2,
        classes=TIGHT,
        policy=TargetPolicy("off", 0.1, 0.4),
        prefix_caching=False,
        schedulers=("slo-piggyback", "load-aware"),
    )


def _alike(draw: random.Random, request: Request) -> Request:
    """One of a few prompts, or its beginning with another end; two parties do not share."""
    stem = random.Random(draw.randrange(3)).choices(range(VOCAB), k=48)
    prompt = tuple(stem[: draw.choice([16, 32, 48])]) + request.prompt[: draw.choice([0, 0, 5])]
    return replace(request, prompt=prompt, cache_salt=draw.choice([b"", b"", b"other"]))


def shared_prefixes(depth: int) -> Scenario:
    draw = random.Random(f"shared {depth}")
    return Scenario(
        requests(draw, 90, every_ms=12, prompt=(6, 6), output=(1, 30), more=_alike),
        limits=Limits(8, 24, 160),
        groups=(GroupSpec("full", 4, 80),),
        host_blocks=(100,),
        depth=depth,
    )


def _special(draw: random.Random, request: Request) -> Request:
    kind = draw.randrange(8)
    if kind == 0:
        return replace(request, embed=True)
    if kind == 1:
        return _sampled(request, prompt_logprobs=1, logprobs=2)
    if kind == 2:
        return _sampled(request, logprobs=0, speculation=3)
    if kind == 3:
        return _sampled(request, bad_token_sequences=((1, 2),), temperature=0.5, seed=7)
    if kind == 4:
        return replace(request, eos_token_ids=tuple(range(0, 97, 9)))
    if kind == 5:
        stops = tuple(draw.randrange(97) for _ in range(9))
        return _sampled(request, stop_token_ids=stops, min_tokens=3, max_tokens=40)
    return request


def kinds(depth: int, groups: Seq[GroupSpec], name: str) -> Scenario:
    """Every kind of request, with several KV groups; some rows turn out to be faulty."""
    draw = random.Random(f"kinds {name}")
    arrivals = requests(draw, 48, every_ms=20, prompt=(6, 60), output=(4, 50), more=_special)
    arrivals += [
        (0.2, Request(1000, (), SamplingParams())),
        (0.2, Request(1001, (1,) * 400, SamplingParams())),
        (0.2, Request(1002, (1, 2), SamplingParams(), service_class="nobody's")),
        (0.3, Request(1003, (1, 2), SamplingParams(max_tokens=30))),
        (0.3, Request(1003, (1, 2), SamplingParams(max_tokens=30))),
    ]
    faults = {
        (number, len(request.prompt) + draw.randrange(6))
        for number, (_, request) in enumerate(arrivals[:48])
        if number % 7 == 3
    }
    return Scenario(
        arrivals,
        limits=Limits(8, 40, 120),
        groups=tuple(groups),
        host_blocks=tuple(group.num_blocks for group in groups),
        depth=depth,
        faults=frozenset(faults),
        policy=TargetPolicy(patience_s=1.0),
    )


FULL_AND_SLIDING = (GroupSpec("full", 4, 90), GroupSpec("sliding", 4, 50, window=10))
SLIDING = (GroupSpec("sliding", 5, 14, window=16), GroupSpec("other", 2, 40, window=7))


def _with_output(draw: random.Random, request: Request) -> Request:
    """Some were recovered from an engine that died, with what it had given out; one had ended."""
    most = request.sampling.max_tokens or 0
    output = tuple(draw.randrange(VOCAB) for _ in range(draw.choice([0, 1, most // 2, most])))
    return replace(request, output=output, crashes=draw.randrange(2))


def recovered() -> Scenario:
    draw = random.Random("recovered")
    return Scenario(
        requests(draw, 50, every_ms=5, prompt=(6, 50), output=(3, 60), more=_with_output),
        groups=(GroupSpec("full", 4, 90),),
        host_blocks=(90,),
        depth=1,
        classes=TIGHT,
    )


def anything(seed: int) -> Scenario:
    """A small world of any kind, and requests of every kind in it."""
    draw = random.Random(f"anything {seed}")
    longest, rows = draw.randint(40, 120), draw.randint(2, 10)
    groups = _groups(draw, longest)
    lengths = {"prompt": (4, longest * 2 // 3), "output": (1, longest // 2)}
    changes = [draw.choice((_guessed, _alike, _special, _with_output)) for _ in range(2)]
    arrivals = requests(
        draw,
        30,
        every_ms=draw.choice([1, 10, 30]),
        more=lambda draw, request: changes[1](draw, changes[0](draw, request)),
        **lengths,
    )
    cancels: dict[int, list[int]] = {}
    for number in range(0, 30, draw.choice([3, 40])):
        cancels.setdefault(draw.randint(1, 200), []).append(number)
    host_blocks = tuple(max(1, group.num_blocks * draw.choice([1, 4, 16]) // 4) for group in groups)
    roomy = all(count >= group.num_blocks for count, group in zip(host_blocks, groups, strict=True))
    return Scenario(
        arrivals,
        limits=Limits(rows, draw.randint(max(rows, 8), 48), longest, draw.choice([0, 0, 4])),
        groups=groups,
        host_blocks=host_blocks,
        depth=draw.randint(0, 1),
        cancels=cancels,
        classes=draw.choice([DEFAULT_CLASSES, TIGHT, HARDLY]),
        policy=TargetPolicy(
            draw.choice(["demote", "reject", "off"]), 0.1, draw.choice([0.05, 0.3, 9.0])
        ),
        prefix_caching=draw.random() < 0.8,
        vocab=draw.choice([VOCAB, VOCAB, 2]),
        phrase=draw.choice([0, 0, 3]),
        cost=draw.choice([COST, replace(COST, move_s=2e-4), replace(COST, host_context_s=2e-6)]),
        host_token_steps=draw.choice([0.0, 0.01, 0.1]),
        schedulers=(*EVERY, HOST_ONLY) if roomy else EVERY,
        watermark_tokens=draw.choice([None, None, 0, 8]),
    )


def _groups(draw: random.Random, longest: int) -> tuple[GroupSpec, ...]:
    """KV groups, from the fewest blocks with which one sequence can advance to some more."""
    size, layout = draw.choice([1, 3, 4, 7]), draw.choice(["full", "full", "both", "sliding"])
    groups = []
    if layout != "sliding":
        least = -(-longest // size)
        groups.append(GroupSpec("full", size, draw.randint(least, 3 * least)))
    if layout != "full":
        window = draw.randint(1, 20)
        least = GroupSpec("sliding", size, 0, window).blocks_to_hold(0, window + 2 * size)
        groups.append(GroupSpec("sliding", size, draw.randint(least, least + 30), window))
    return tuple(groups)


# The seeds are those with which lines run that no other scenario reaches.
ALL: Mapping[str, Callable[[], Scenario]] = {
    "azure-conversation": partial(CONVERSATION, 90),
    "azure-code": partial(CODE, 90),
    "mooncake": partial(MOONCAKE, 70),
    "full-pool": partial(full_pool, 1),
    "full-pool-depth-0": partial(full_pool, 0),
    "classes-demoted": partial(mixed_classes, "demote"),
    "classes-rejected": partial(mixed_classes, "reject"),
    "classes-late": partial(mixed_classes, "off"),
    "cancels": partial(cancelled, 1),
    "cancels-depth-0": partial(cancelled, 0),
    "drafts": partial(drafts, 1, VOCAB),
    "drafts-short-words": partial(drafts, 0, 2),
    "drafts-with-slips": partial(drafts, 1, VOCAB, 5, 2),
    "long-text": long_text,
    "large-host": partial(on_host, 1600, 1, 0.01),
    "small-host": partial(on_host, 200, 1, 0.05),
    "host-depth-0": partial(on_host, 600, 0, 0.002),
    "tight-window": partial(tight_window, 2),
    "long-piggybacks-1": partial(long_piggybacks, 1),
    "long-piggybacks-23": partial(long_piggybacks, 23),
    "shared-prefixes": partial(shared_prefixes, 1),
    "shared-prefixes-depth-0": partial(shared_prefixes, 0),
    "kinds": partial(kinds, 1, FULL_AND_SLIDING, "both"),
    "kinds-sliding": partial(kinds, 0, SLIDING, "sliding"),
    "recovered": recovered,
    **{f"anything-{seed}": partial(anything, seed) for seed in (*range(6), 18, 31, 83)},
    "azure-conversation-long": partial(CONVERSATION, 400),
    "azure-code-long": partial(CODE, 800),
    "mooncake-long": partial(MOONCAKE, 600),
}
LONG = ("azure-conversation-long", "azure-code-long", "mooncake-long")
OF_TRACES = ("azure-conversation", "azure-code", "mooncake", *LONG)
