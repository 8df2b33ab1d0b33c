"""BlendServe's synthesiser: offline traces with a given density and sharing, of three kinds.

The paper mixes BurstGPT (compute-heavy), OpenVid (long outputs) and MMLU (high sharing). Their
texts and lengths are not at hand, so each is a synthetic substitute: log-normal lengths whose means
give the density and the sharing that the paper's table 4 quotes for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from weft.blend.density import Ints, Rates
from weft.core.errors import ParameterError

VOCAB = 128_256  # token ids are drawn from Llama 3's vocabulary


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of one sort.

    Attributes:
        density: compute over memory time of its requests, without sharing.
        own: mean tokens of the text that each prompt has for itself.
        prompt_spread, output_spread: standard deviation over mean.
        system: tokens that all its prompts begin with.
        topics, topic_tokens: how many texts there are of which every prompt has one next.
    """

    name: str
    density: float
    own: float
    prompt_spread: float
    output_spread: float
    system: int
    topics: int = 0
    topic_tokens: int = 0

    @property
    def prompt(self) -> float:
        """Mean tokens of a prompt."""
        return self.system + (self.topic_tokens if self.topics else 0) + self.own

    def output(self, rates: Rates) -> float:
        """Mean output tokens with which the kind has its density.

        Solves ``token_s (p + d) = rho read_s (p d + E[d^2] / 2)`` for d (BlendServe section 4.1).
        """
        half = (1 + self.output_spread**2) / 2
        ratio = rates.token_s / (rates.read_s * self.density)
        lack = ratio - self.prompt
        return (lack + math.sqrt(lack**2 + 4 * half * ratio * self.prompt)) / (2 * half)


# Density and sharing: BlendServe table 4 (BurstGPT 17.78 and 0.02, OpenVid 0.05 and 0.00, MMLU
# 54.91 and 0.86). Prompts have "typically hundreds of tokens" (section 3.1); MMLU has 57 subjects,
# with solved questions before one of about 100 tokens. The spreads are assumed: moderate.
BURSTGPT = Kind("burstgpt", 17.78, 600.0, 0.5, 0.5, 16)
OPENVID = Kind("openvid", 0.05, 100.0, 0.5, 0.5, 16)
MMLU = Kind("mmlu", 54.91, 101.0, 0.3, 0.3, 48, 57, 656)

TRACES = {1: (1.4, 0.35), 2: (0.9, 0.35), 3: (1.4, 0.05), 4: (0.9, 0.05)}  # table 2


@dataclass(frozen=True, slots=True)
class Blended:
    """A synthetic trace.

    Attributes:
        prompts: arrays of token ids.
        outputs: (n,) tokens of each answer.
        kinds: (n,) index of each request's kind in ``names``.
    """

    prompts: list[Ints]
    outputs: Ints
    kinds: Ints
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def tokens(self) -> int:
        """Prompt and output tokens in all, shared ones counted as often as they are asked for."""
        return int(sum(map(len, self.prompts)) + self.outputs.sum())


def shortened(kind: Kind, factor: float) -> Kind:
    """The kind with outputs about ``factor`` times as long, and a density to match."""
    return replace(kind, density=kind.density / factor)


def counts(
    density: float, sharing: float, heavy: int, kinds: Seq[Kind], rates: Rates
) -> tuple[int, int, int]:
    """Requests of each kind that together give the density and the sharing.

    Args:
        density: ``(1 - s) sum T_comp / sum T_mem`` of the whole trace.
        sharing: the share s of its arithmetic that sharing prefixes saves.
        heavy: requests with long outputs; the others follow from the two targets.
        kinds: compute-heavy, memory-heavy, sharing.

    Raises:
        ParameterError: no mix of these kinds has both.
    """
    compute, memory, saved = [], [], []
    for kind in kinds:
        output = kind.output(rates)
        squares = rates.square_s * (kind.prompt**2 + (kind.own * kind.prompt_spread) ** 2)
        compute.append(rates.token_s * (kind.prompt + output) + squares)
        half = (1 + kind.output_spread**2) / 2
        memory.append(rates.read_s * (kind.prompt * output + half * output**2))
        saved.append(rates.token_s * (kind.prompt - kind.own))
    # saved = s compute and compute - saved = rho memory, with the memory-heavy ones given.
    lines = np.array(
        [
            [saved[i] - sharing * compute[i], compute[i] - saved[i] - density * memory[i]]
            for i in range(3)
        ]
    ).T
    light, alike = np.linalg.solve(lines[:, [0, 2]], -lines[:, 1] * heavy)
    if min(light, alike) < 0:
        raise ParameterError(
            f"No mix of {', '.join(kind.name for kind in kinds)} has density {density:g} and "
            f"sharing {sharing:.0%}.",
            param="density",
        )
    return round(light), heavy, round(alike)


def synthesise(
    numbers: Seq[int], kinds: Seq[Kind], rates: Rates, seed: int = 0, job: int = 256
) -> Blended:
    """Make so many requests of each kind.

    Args:
        job: requests come in jobs of so many of one kind, as users submit them, jobs in random
            order.
    """
    rng = np.random.default_rng(seed)
    prompts: list[Ints] = []
    outputs, members = [], []
    for index, (number, kind) in enumerate(zip(numbers, kinds, strict=True)):
        prompts += _prompts(kind, number, rng)
        outputs.append(_lengths(kind.output(rates), kind.output_spread, number, rng))
        members.append(np.full(number, index, np.int64))
    order = _in_jobs([len(kind) for kind in members], job, rng)
    names = tuple(kind.name for kind in kinds)
    arranged = [prompts[at] for at in order]
    return Blended(arranged, np.concatenate(outputs)[order], np.concatenate(members)[order], names)


def _lengths(mean: float, spread: float, number: int, rng: Any) -> Ints:
    """Log-normal lengths of at least one token: its quantiles, in random order."""
    sigma = math.sqrt(math.log(1 + spread**2))
    normal = NormalDist(math.log(mean) - sigma**2 / 2, sigma)
    drawn = [math.exp(normal.inv_cdf((index + 0.5) / number)) for index in range(number)]
    return np.asarray(np.maximum(1, np.rint(rng.permutation(drawn))), np.int64)


def _prompts(kind: Kind, number: int, rng: Any) -> list[Ints]:
    own = _lengths(kind.own, kind.prompt_spread, number, rng)
    system = rng.integers(0, VOCAB, kind.system, np.int32)
    topics = rng.integers(0, VOCAB, (max(1, kind.topics), kind.topic_tokens), np.int32)
    which = rng.integers(0, max(1, kind.topics), number)
    text = rng.integers(0, VOCAB, int(own.sum()), np.int32)
    ends = np.cumsum(own)
    return [
        np.concatenate([system, topics[topic], text[end - count : end]])
        for topic, count, end in zip(which, own, ends, strict=True)
    ]


def _in_jobs(sizes: Seq[int], job: int, rng: Any) -> Ints:
    """Positions of all requests, job by job."""
    jobs = []
    first = 0
    for size in sizes:
        end = first + size
        jobs += [np.arange(at, min(at + job, end)) for at in range(first, end, job)]
        first = end
    return np.concatenate([jobs[at] for at in rng.permutation(len(jobs))])
