"""The training loop: packed sequences, two lengths, warm-up, plateau and linear decay."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from builtin.model import Llama, Shape
from builtin.optim import Muon, TokenLoss


@dataclass(frozen=True)
class Plan:
    """What is trained, how long and how fast. A step always has `step_tokens` tokens."""

    steps: int
    seed: int = 0
    step_tokens: int = 4096
    short_length: int = 512
    long_length: int = 2048
    long_share: float = 0.18  # of the steps, the last ones
    chat_share: float = 0.18  # of the tokens
    warmup_steps: int = 40
    decay_share: float = 0.45  # of the steps, the last ones; rates fall linearly to zero
    muon_rate: float = 0.02
    adam_rate: float = 4e-3
    clip: float = 1.0

    @property
    def tokens(self) -> int:
        return self.steps * self.step_tokens

    def length(self, step: int) -> int:
        """Tokens per sequence at `step`."""
        return self.long_length if step >= self.steps * (1 - self.long_share) else self.short_length

    def rate(self, step: int) -> float:
        """The factor on all learning rates at `step`, in (0, 1]."""
        warm = (step + 1) / self.warmup_steps
        cool = (self.steps - step) / (self.steps * self.decay_share)
        return min(1.0, warm, cool)


class Stream:
    """Endless batches over the encoded documents; each epoch has its own order and chats."""

    def __init__(self, plain: list[list[int]], chat: list[list[int]], plan: Plan) -> None:
        self.plain = [torch.tensor(ids) for ids in plain]
        self.chat = [torch.tensor(ids) for ids in chat]
        self.plan = plan
        self.generator = torch.Generator().manual_seed(plan.seed)
        self.next_chat = 0
        self.epochs = 0

    def _take_chats(self) -> list[Tensor]:
        """The next chats of the round, enough of them to be `chat_share` of an epoch."""
        share = self.plan.chat_share
        wanted = sum(map(len, self.plain)) * share / (1 - share)
        taken: list[Tensor] = []
        while wanted > 0 and self.chat:
            taken.append(self.chat[self.next_chat % len(self.chat)])
            wanted -= len(taken[-1])
            self.next_chat += 1
        return taken

    def _epoch(self, length: int) -> Iterator[tuple[Tensor, Tensor]]:
        documents = self.plain + self._take_chats()
        order = torch.randperm(len(documents), generator=self.generator)
        stream = torch.cat([documents[i] for i in order])
        starts = torch.arange(0, len(stream) - length, length)
        starts = starts[torch.randperm(len(starts), generator=self.generator)]
        self.epochs += 1
        for rows in starts.split(self.plan.step_tokens // length):
            if len(rows) == self.plan.step_tokens // length:
                block = stream[rows[:, None] + torch.arange(length + 1)]
                yield block[:, :-1], block[:, 1:]

    def batches(self, length: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets, each [rows, length], for ever."""
        while True:
            yield from self._epoch(length)


class Trainer:
    """Owns the model and its optimizers; `step` is one update."""

    def __init__(self, shape: Shape, plan: Plan) -> None:
        torch.manual_seed(plan.seed)
        self.plan = plan
        self.model = Llama(shape)
        hidden = [p for p in self.model.model.layers.parameters() if p.ndim == 2]
        others = [p for p in self.model.parameters() if not any(p is h for h in hidden)]
        self.muon = Muon(hidden)
        self.adam = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, step: int, inputs: Tensor, targets: Tensor) -> float:
        """Update on one batch; returns its loss in nats per token."""
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(inputs)
        loss = TokenLoss.apply(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.clip)
        rate = self.plan.rate(step)
        self.muon.step(rate * self.plan.muon_rate)
        for group in self.adam.param_groups:
            group["lr"] = rate * self.plan.adam_rate
        self.adam.step()
        self.model.zero_grad(set_to_none=True)
        return float(loss.detach())


def run(
    trainer: Trainer, stream: Stream, after_step: Callable[[], None], report_every: int = 10
) -> None:
    """Train to the plan's end, printing progress and calling `after_step` each step."""
    plan, started, length, mean = trainer.plan, time.monotonic(), 0, 0.0
    for step in range(plan.steps):
        if plan.length(step) != length:
            length = plan.length(step)
            batches = stream.batches(length)
        loss = trainer.step(step, *next(batches))
        mean = loss if step == 0 else 0.95 * mean + 0.05 * loss
        if step % report_every == 0 or step == plan.steps - 1:
            seconds = time.monotonic() - started
            speed = (step + 1) * plan.step_tokens / seconds
            left = (plan.steps - step - 1) * plan.step_tokens / speed
            print(
                f"step {step + 1}/{plan.steps}  length {length}  loss {loss:.3f}"
                f"  mean {mean:.3f}  {speed:.0f} tok/s  ETA {left / 60:.1f} min",
                flush=True,
            )
        after_step()
