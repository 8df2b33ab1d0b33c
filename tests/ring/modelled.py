"""A scheduler on the modelled executor, alike in the test's process and in an engine process."""

from __future__ import annotations

import time
from dataclasses import replace

from weft.core.plan import PromptLogprobs, StepPlan, StepResult
from weft.core.types import SamplingParams, TokenLogprob
from weft.kv.cache import GroupSpec, KVCache
from weft.ring.layout import EngineInfo
from weft.sched.registry import fcfs
from weft.sched.scheduler import Limits, Scheduler
from weft.sim.executor import ModelledExecutor

VOCAB = 997
LIMITS = Limits(16, 64, 512)
GROUPS = (GroupSpec("full", 4, 400),)


def score(token: int, top: int) -> TokenLogprob:
    """Log probabilities that can be computed by hand; exact in float32."""
    others = tuple(((token + i) % VOCAB, -0.25 * i) for i in range(top))
    return TokenLogprob(token, -token / 64, token % 7, others)


class ScoringExecutor(ModelledExecutor):
    """The modelled executor, with log probabilities for the rows that ask for them."""

    def __init__(self, *, depth: int = 0, step_s: float = 0.0, faulty=None) -> None:
        super().__init__(GROUPS, VOCAB, depth=depth, faulty=faulty)
        self._params: dict[int, tuple[SamplingParams, tuple[int, ...]]] = {}
        self._step_s = step_s

    def launch(self, plan: StepPlan):
        for add in plan.add:
            self._params[add.sequence_id] = (add.sampling, add.tokens[: add.num_prompt])
        return super().launch(plan)

    def collect(self, ticket) -> StepResult:
        if self._step_s:
            time.sleep(self._step_s)
        rows = {index: row.sequence_id for index, row in self._rows.items()}
        rows |= {add.row: add.sequence_id for add in ticket.plan.add}
        result = super().collect(ticket)
        logprobs = {}
        for sequence_id, token in zip(result.sequence_ids, result.tokens, strict=True):
            top = self._params[sequence_id][0].logprobs
            if top is not None:
                logprobs[sequence_id] = score(token, top)
        return replace(result, logprobs=logprobs, prompt_logprobs=self._scores(ticket.plan, rows))

    def _scores(self, plan: StepPlan, rows: dict[int, int]) -> dict[int, PromptLogprobs]:
        found = {}
        for batch in plan.batches:
            for row, start, count in zip(batch.rows, batch.starts, batch.counts, strict=True):
                params, prompt = self._params[rows[row]]
                scored = prompt[start + 1 : start + count + 1]
                if params.prompt_logprobs is not None and scored:
                    entries = tuple(score(token, params.prompt_logprobs) for token in scored)
                    found[rows[row]] = PromptLogprobs(start + 1, entries)
        return found


def scheduler() -> Scheduler:
    return fcfs(KVCache(GROUPS), LIMITS)


def info(**more: int) -> EngineInfo:
    return EngineInfo(
        ready=1,
        max_model_len=LIMITS.max_model_len,
        max_num_seqs=LIMITS.max_num_seqs,
        max_num_batched_tokens=LIMITS.max_num_batched_tokens,
        vocab_size=VOCAB,
        **more,
    )
