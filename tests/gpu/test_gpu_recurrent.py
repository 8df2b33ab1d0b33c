"""Recurrent layers on the device: captured as uncaptured, read by slot, and as plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checkpoints import build, prompt, save
from served import Truth, opened, serve, settings_for, tight

import where
from depth import deep_on_cpu
from weft.core.config import EngineConfig
from weft.core.types import FinishReason, SamplingParams
from weft.engine.model import _step_sizes
from weft.exec.device import CudaDevice, Device, HostDevice
from weft.exec.step_layout import sizes_for
from weft.exec.workspace import pinned_bytes

TOLERANCE = 5e-4  # of float32 logits
SLOTS = 12  # few enough to be short, enough for marks
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, seed=0)
LONGER = SamplingParams(temperature=0.5, seed=8, max_tokens=72, ignore_eos=True)
# One longer than a step, one of a token, two with the same beginning.
LONG = prompt(90, 1)
PROMPTS = [LONG, [5], prompt(20, 2), [*LONG[:64], 9, 8], prompt(33, 4)]


NAMES = ["qwen3-next", "lfm2", "granite-hybrid", "kimi-linear"]
OTHERS = ["qwen3.5-layers", "lfm3", "nemotron-h-moe", "bailing-hybrid", "granite-hybrid-moe"]
NAMES += [pytest.param(name, marks=deep_on_cpu) for name in OTHERS]


@pytest.mark.parametrize("name", NAMES)
def test_captured_steps_are_uncaptured_ones_and_plain_torch(name, tmp_path, monkeypatch) -> None:
    """Chunks beside decodes, a prefix hit, and sequences that give way and go on."""
    folder = save(build(name), tmp_path / name)
    monkeypatch.setattr("weft.core.resolved.state_slots", lambda *_: SLOTS)
    truth, found, memory = Truth(folder), {}, tight(folder)
    for graphs in (True, False):
        with opened(folder, graphs=graphs) as engine:
            assert (engine.executor.captured > 0) == graphs
            first = serve(engine, PROMPTS, [GREEDY] * len(PROMPTS))
            again = [answer for _ in range(2) for answer in serve(engine, [LONG], [GREEDY])]
            assert again[1].cached_tokens > 0
            assert not engine.executor.resident
        with opened(folder, graphs=graphs, kv_memory=memory) as engine:
            grown = serve(engine, [prompt(6, 9 + i) for i in range(4)], [LONGER] * 4)
            assert engine.scheduler.totals.preemptions > 0
        found[graphs] = first + again + grown
        assert {answer.finish for answer in found[graphs]} == {FinishReason.LENGTH}
    assert [a.tokens for a in found[True]] == [a.tokens for a in found[False]]
    for tokens, answer in zip([*PROMPTS, LONG, LONG], found[True][:7], strict=True):
        assert truth.miss(tokens, answer) < TOLERANCE


@deep_on_cpu
@pytest.mark.parametrize("name", ["qwen3.5", "lfm2-moe", "nemotron-h-moe", "bailing-hybrid"])
def test_kernels_of_gpus_go_on_from_slots(name, tmp_path) -> None:
    """A prompt in chunks, and again from what the first time has left."""
    folder = save(build(name), tmp_path / "model")
    truth, tokens = Truth(folder), prompt(38, 3)
    asked = [SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, seed=0)]
    settings = {"kernels": "triton", "graphs": False, "max_num_batched_tokens": 16}
    with opened(folder, **settings) as engine:
        cold, warm = (serve(engine, [tokens], asked)[0] for _ in range(2))
    assert warm.cached_tokens > 0
    assert cold.tokens == warm.tokens
    assert truth.miss(tokens, cold) < TOLERANCE


def test_drafts_change_no_token(tmp_path) -> None:
    """Texts that repeat themselves, so that guesses are made, right ones and wrong ones."""
    folder = save(build("qwen3-next"), tmp_path / "model")
    prompts = [prompt(8, 1) * 5, prompt(20, 2), prompt(5, 3) * 6, prompt(30, 4)]
    biases = ({3: 50.0}, {}, {3: 20.0, 5: 20.0}, {3: 3.0, 5: 3.0})
    asked = [replace(GREEDY, max_tokens=40, logit_bias=bias) for bias in biases]
    found = {}
    for drafts in (0, 4):
        with opened(folder, speculation=drafts) as engine:
            found[drafts] = [answer.tokens for answer in serve(engine, prompts, asked)]
            guessed = engine.scheduler.totals.drafted_tokens
            assert bool(guessed) == bool(drafts)
    assert found[0] == found[4]


def test_slots_in_the_buffer_of_steps_are_counted(tmp_path, monkeypatch) -> None:
    """What steps pin is known before, to the byte, and the slots are part of the KV memory."""
    taken = []

    device = CudaDevice if where.ON_GPU else HostDevice
    make = device.host_memory

    def counted(self: Device, size: int, dtype: torch.dtype) -> torch.Tensor:
        taken.append(size * dtype.itemsize)
        return make(self, size, dtype)

    for name in ("host_memory", "exchange_memory"):
        monkeypatch.setattr(device, name, counted)
    monkeypatch.setattr("graphed.SIZES", sizes_for(8))
    folder = save(build("qwen3.5"), tmp_path / "model")
    with opened(folder, resident="off", graphs=False) as engine:
        spec, resolved = engine.model.spec, engine.resolved
        config = EngineConfig(**settings_for(folder, resident="off", graphs=False))
        sizes = _step_sizes(config, spec, (4, 0), halves=False)
        assert sum(taken) == pinned_bytes(spec, 4, sizes)
        states = engine.executor._store.states.layers.values()
        found = sum(part.nbytes for layer in states for part in layer)
        assert found == resolved.state_slots * spec.states.slot_bytes
        store = engine.executor._store
        kv = sum(t.nbytes for g in range(len(spec.kv_groups)) for t in store.tensors(g))
        assert kv + found == resolved.kv_bytes
