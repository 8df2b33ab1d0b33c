"""Penalties, bias, minimum lengths, grammars, log probabilities and drafts, all on the device.

The tokens are those of the eager executor on the CPU, and no step waits for the host.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checkpoints import prompt
from graphed import BlindDevice, use_graphs

from weft import LLM, SamplingParams
from weft.core.errors import GrammarError
from weft.exec import collect, input_batch
from weft.exec.captured import CapturedSteps
from weft.exec.device_rows import DeviceRows
from weft.exec.functions import StepFunctions
from weft.exec.grammar import GrammarRows
from weft.exec.graphs import GraphExecutor
from weft.kernels.sampling import IN_PROMPT, RowState, state_bytes

FREE = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
DRAWN = replace(FREE, temperature=0.9, seed=5)
WORD = "start: /[a-z]{5}[0-9]{9}/"
STOPS = tuple(range(200, 300))
BIAS = {300: 12.0, 301: 11.0, 250: 8.0}
KINDS = {
    "plain": FREE,
    "repetition": replace(FREE, repetition_penalty=1.05),
    "all penalties": replace(
        DRAWN, presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.2
    ),
    "rewards": replace(DRAWN, repetition_penalty=0.8, presence_penalty=-0.5),
    "bias": replace(DRAWN, logit_bias=BIAS, frequency_penalty=0.4),
    "a minimum": replace(FREE, min_tokens=9, ignore_eos=False, stop_token_ids=STOPS),
    "a minimum of what bias wants": replace(
        FREE, logit_bias={250: 9.0}, min_tokens=7, ignore_eos=False, stop_token_ids=STOPS
    ),
    "probabilities": replace(DRAWN, logprobs=5),
    "its own alone": replace(FREE, logprobs=0, repetition_penalty=1.3),
    "drafts": replace(FREE, speculation=6, max_tokens=50),
    "drafts with everything": replace(
        DRAWN, speculation=5, logit_bias={300: 12.0, 301: 11.0}, frequency_penalty=0.1, logprobs=2,
        min_tokens=20, ignore_eos=False, stop_token_ids=(301,), max_tokens=50,
    ),
}  # fmt: skip
GRAMMARS = {
    "a grammar": SamplingParams(temperature=0.7, seed=9, max_tokens=24, grammar=WORD),
    "a grammar with everything": SamplingParams(
        temperature=0.9, seed=4, max_tokens=24, min_tokens=22, grammar=WORD, logprobs=2,
        logit_bias={300: 12.0, 301: 11.0}, frequency_penalty=0.1, presence_penalty=0.4,
    ),
    "drafts": KINDS["drafts"],
    "a choice": SamplingParams(temperature=0, max_tokens=24, grammar='start: "yes" | "no"'),
}  # fmt: skip
PROMPTS = [prompt(12, 1) * 4, prompt(7, 2), prompt(60, 3), prompt(9, 3) * 3, [5]]


def packaged(**settings) -> LLM:
    common = {"dtype": "bfloat16", "threads": 1, "kv_memory": "16MiB", "max_model_len": 512}
    common |= {"max_num_seqs": 8, "max_num_batched_tokens": 96}
    return LLM.in_process("builtin", **{**common, **settings})


def answers(llm: LLM, kinds: list[SamplingParams]):
    """What requests get, each kind for two prompts, all in one crowd."""
    asked = [kind for kind in kinds for _ in range(2)]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(asked))]
    results = llm.generate(prompts, asked, progress=False)
    llm.engine.built.scheduler.check()
    return [(r.token_ids, r.finish_reason, r.logprobs, r.error) for r in results]


@pytest.fixture(scope="module")
def expected():
    with packaged() as llm:
        assert llm.engine.served.executor.startswith("eager")
        found = answers(llm, list(KINDS.values()))
    assert all(error is None for *_, error in found)
    return found


def watch_waits(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each step from now on, whether its launch waited for what was launched before.

    Steps that drop rows may wait, and are left out.
    """
    waited: list[bool] = []
    launching: list[bool] = []
    launch, finish = GraphExecutor.launch, BlindDevice.finish

    def watched(self, plan):
        launching.append(False)
        ticket = launch(self, plan)
        if not plan.drop:
            waited.append(launching[0])
        launching.clear()
        return ticket

    def finished(self, place):
        if launching and self._finished < place:
            launching[0] = True
        finish(self, place)

    monkeypatch.setattr(GraphExecutor, "launch", watched)
    monkeypatch.setattr(BlindDevice, "finish", finished)
    return waited


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 17, "speculation": 2},
        {"kv_memory": "600KiB", "max_model_len": 128, "prefix_caching": False},
        {"graphs": False, "steps_in_flight": 0},
    ],
)
def test_requests_get_what_the_eager_executor_gives_and_no_step_waits(
    expected, settings, monkeypatch
):
    waited = watch_waits(monkeypatch)
    use_graphs(monkeypatch)
    # Nothing of it is left to the host.
    for name in ("_sample_on_host", "_score_prompts"):
        monkeypatch.setattr(GraphExecutor, name, None)
    monkeypatch.setattr(collect, "count_taken", None)
    with packaged(**settings) as llm:
        assert answers(llm, list(KINDS.values())) == expected
        totals = llm.engine.built.scheduler.totals
        scarce = "kv_memory" in settings
        assert (totals.preemptions > 0) == scarce
        assert totals.drafted_tokens >= totals.accepted_tokens > 0
        assert scarce or totals.drafted_tokens > totals.accepted_tokens
    assert len(waited) > 50
    assert not any(waited)


@pytest.mark.parametrize(
    "settings",
    [{}, {"kv_memory": "400KiB", "max_model_len": 128, "prefix_caching": False}],
)
def test_grammars_give_what_the_eager_executor_gives(settings, monkeypatch):
    """Rows end, give way and come back while a step that has them is computed already."""
    kinds = list(GRAMMARS.values())
    with packaged() as llm:
        wanted = answers(llm, kinds)
    assert [finish for _, finish, *_ in wanted[-2:]] == ["stop"] * 2
    use_graphs(monkeypatch)
    monkeypatch.setattr(GraphExecutor, "_sample_on_host", None)
    with packaged(**settings) as llm:
        assert answers(llm, kinds) == wanted
        scarce = "kv_memory" in settings
        assert (llm.engine.built.scheduler.totals.preemptions > 0) == scarce


def test_the_device_is_two_steps_deep_beside_a_grammar(monkeypatch):
    """A forward pass is ordered before the last step has ended; its masks and choice wait."""
    events: list[str] = []
    use_graphs(monkeypatch)

    def noting(name: str, event: str) -> None:
        method = getattr(CapturedSteps if event in ("forward", "sample") else GraphExecutor, name)

        def noted(self, *given):
            events.append(event)
            return method(self, *given)

        owner = CapturedSteps if event in ("forward", "sample") else GraphExecutor
        monkeypatch.setattr(owner, name, noted)

    for name, event in (("forward", "forward"), ("sample", "sample"), ("_finish", "finish")):
        noting(name, event)
    grammar = GRAMMARS["a grammar"]
    for crowd in ([grammar], [grammar, replace(FREE, max_tokens=60)]):
        with packaged() as llm:
            llm.generate(PROMPTS[:1], grammar, progress=False)  # compiled, it is admitted at once
            events.clear()
            results = llm.generate(PROMPTS[: len(crowd)], crowd, progress=False)
        ahead = " ".join(events).count("forward finish sample")
        assert ahead >= len(results[0].token_ids) - 2, events


@pytest.mark.parametrize("when", [0, 5])
def test_a_grammar_that_fails_ends_its_own_row_alone(when, monkeypatch):
    """Masks are made while a step computes that has the row already, and one more is planned."""
    asked = [
        GRAMMARS["a grammar"],
        FREE,
        replace(GRAMMARS["a grammar"], grammar="start: /[0-9]{20}/"),
    ]
    with packaged() as llm:
        alone = llm.generate(PROMPTS[1:2], asked[1], progress=False)[0].token_ids
        other = llm.generate(PROMPTS[2:3], asked[2], progress=False)[0].token_ids
    fill = GrammarRows._fill

    def failing(self, number, mask):
        row = self._rows[number]
        if row.grammar == WORD and len(row.output) >= when:
            row.error = GrammarError("it cannot go on")
        return fill(self, number, mask)

    monkeypatch.setattr(GrammarRows, "_fill", failing)
    use_graphs(monkeypatch)
    with packaged() as llm:
        failed, free, numbers = llm.generate(PROMPTS[:3], asked, progress=False)
        llm.engine.built.scheduler.check()
    assert "it cannot go on" in str(failed.error)
    assert len(failed.token_ids) == when
    assert (free.token_ids, numbers.token_ids) == (alone, other)


def test_a_request_that_names_more_tokens_than_the_device_takes(expected, monkeypatch):
    """Its tokens are chosen on the host, with its drafts and in the crowd of the others."""
    use_graphs(monkeypatch)
    monkeypatch.setattr(input_batch, "MOST_EDITS", 2)
    on_host = watch_rows_on_host(monkeypatch)
    with packaged() as llm:
        assert answers(llm, list(KINDS.values())) == expected
    kinds = [sum(name in kind for kind in KINDS) for name in ("bias", "a minimum", "everything")]
    assert sum(on_host) == 2 * (sum(kinds) - 1)  # one has bias and a minimum


def watch_rows_on_host(monkeypatch) -> list[bool]:
    """For each row that is added, whether the device leaves its tokens to the host."""
    found: list[bool] = []
    add_row = DeviceRows.add_row

    def watched(self, row):
        found.append(row in self._table.on_host)
        add_row(self, row)

    monkeypatch.setattr(DeviceRows, "add_row", watched)
    return found


def test_tokens_of_a_step_that_ran_out_of_memory_are_counted_once(expected, monkeypatch):
    """Log probabilities find no memory after the tokens were chosen: the rows run one by one."""
    score, calls = StepFunctions.score, []

    def starving(self, layout, samples, alternatives):
        calls.append(len(samples))
        if len(samples) > 1:
            raise MemoryError
        return score(self, layout, samples, alternatives)

    monkeypatch.setattr(StepFunctions, "score", starving)
    use_graphs(monkeypatch)
    with packaged() as llm:
        assert answers(llm, list(KINDS.values())) == expected
    assert sum(count > 1 for count in calls) > 10


def test_the_last_token_of_a_row_is_the_last_one_that_is_kept(monkeypatch):
    use_graphs(monkeypatch)
    take, kept = collect.StepOutput.take, []
    with packaged() as llm:
        executor = llm.engine.built.executor
        last_token = executor._rows.state.last_token

        def watched(self, batch, rows, sampled, state):
            take(self, batch, rows, sampled, state)
            table = executor._table
            for row, draft in batch.drafts.items():
                latest = int(table.tokens[row, table.length[row] - 1])
                kept.append((int(last_token[row]), latest, len(draft)))

        monkeypatch.setattr(collect.StepOutput, "take", watched)
        llm.generate(PROMPTS[:1] * 2, KINDS["drafts with everything"], progress=False)
    assert len(kept) > 5
    assert all(found == latest for found, latest, _ in kept)


def test_a_row_that_asks_for_nothing_leaves_the_device_alone(monkeypatch):
    """Who follows in a row is neither penalised nor biased for who was there before."""
    use_graphs(monkeypatch)
    with packaged(max_num_seqs=1) as llm:
        state = llm.engine.built.executor._rows.state
        [plain] = llm.generate(PROMPTS[:1], FREE, progress=False)
        assert not state.counts.any()
        kind = replace(KINDS["all penalties"], logit_bias=BIAS, max_tokens=5)
        [other] = llm.generate(PROMPTS[:1], kind, progress=False)
        counts = state.counts[0].clone()
        tokens = torch.tensor(other.token_ids)
        assert torch.equal(counts[tokens] % IN_PROMPT, torch.bincount(tokens)[tokens])
        assert (counts[torch.tensor(PROMPTS[0])] >= IN_PROMPT).all()
        [again] = llm.generate(PROMPTS[:1], FREE, progress=False)
        assert torch.equal(state.counts[0], counts)
    assert again.token_ids == plain.token_ids


def test_plain_torch_serves_too(monkeypatch):
    kinds = [kind for name, kind in KINDS.items() if name not in ("plain", "repetition")]
    found = []
    for graphs in (False, True):
        if graphs:
            use_graphs(monkeypatch)
        with packaged(kernels="reference") as llm:
            assert llm.engine.served.kernels["process_logits"]["kernel"] == "reference"
            results = [llm.generate(PROMPTS[:1], kind, progress=False)[0] for kind in kinds]
            found.append([(r.token_ids, r.finish_reason) for r in results])
    assert found[0] == found[1]


def test_what_rows_take_on_the_device_is_known_before():
    state = RowState.empty(7, 20, 301, torch.device("cpu"))
    assert sum(tensor.nbytes for tensor in vars(state).values()) == state_bytes(7, 20, 301)
