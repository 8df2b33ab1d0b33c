"""Costs from a hardware sheet: each part takes the longer of its arithmetic and its memory time."""

from __future__ import annotations

from typing import NamedTuple

from weft.core.errors import ConfigError, OutOfMemoryError
from weft.core.kv_types import KV_TYPES
from weft.cost.hardware import Hardware
from weft.cost.model import PIGGYBACK_LAYER_S, Terms
from weft.cost.shape import ModelShape
from weft.cost.work import Work

_FLOAT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
# Of weights; int4 with a scale of 16 bits for every 64.
BYTES = {**_FLOAT_BYTES, "fp8": 1.0, "int8": 1.0, "int4": 0.53125}
KV_BYTES = {**_FLOAT_BYTES, **{name: float(kv.code_bytes) for name, kv in KV_TYPES.items()}}


class Overhead(NamedTuple):
    """Seconds that the host holds a step up: a fixed part, and one for each sequence in it."""

    step_s: float
    row_s: float


# A CPU-driven engine in Python on an A100: the sum of the medians of scheduling, preparing inputs,
# sampling and processing outputs for Llama-2-7B over batch sizes 8 to 128, by least squares
# (microsoft/vidur, cpu_overheads of a100, the file a100_cpu_overheads_a.csv).
CPU_DRIVEN = Overhead(0.790e-3, 42.6e-6)
NO_OVERHEAD = Overhead(0.0, 0.0)

# What one all-reduce takes before any byte moves: vLLM's own one in a graph, 2 GPUs, the smallest
# message, is measured at 4.3 us on H100, 4.9 us on A100, 5.4 us on L40S (aiconfigurator-core 0.12).
ALL_REDUCE_S = 5e-6


class Roofline:
    """A cost model that needs no measurement. Times are lower bounds, except the host's overhead.

    - dense: ``max(2 * P * tokens / C, weight bytes / B)``, the weights read once a step. Of the
      experts of a mixture, those are read that at least one token goes to, the choice taken as
      uniform.
    - prefill attention: ``4 * D * area`` FLOPs a layer (pairs that causality masks are skipped, so
      for a whole prompt half of BlendServe's 4 p^2 D), or reading the KV before each chunk.
    - decode attention: the KV of every context read once, ``2 b H_kv L * sum n / B`` (BlendServe
      section 4.1), or its arithmetic.
    - CPU attention: the same with the host's bandwidth and arithmetic.
    - KV moves: KV each way over the link (both ways at once), with the queries and outputs of host
      attention.
    - collectives: two all-reduces a layer, ``alpha + 2 (tp - 1) / tp * bytes / bandwidth`` (ring).
    - head: as dense, over the sampled rows; sampling reads and writes its float32 logits once.

    - recurrent layers, of each row: its state of all of them read once and written once, or the
      arithmetic of its tokens; with prefill or decode attention.

    A sliding layer reads at most its window of each context; of several contexts only the sum is
    known, so the bound is taken on their mean.

    Args:
        dtype: of weights and arithmetic.
        kv_dtype: of KV; by default ``dtype``, but bf16 where weights are fp8 or int8.
        tp: devices over which every layer is split.
        overhead: what the host adds to each step.

    Raises:
        ConfigError: the hardware does not compute in ``dtype``, has no links for ``tp``, or the
            model's heads cannot be split so.
    """

    def __init__(
        self,
        shape: ModelShape,
        hardware: Hardware,
        dtype: str = "bf16",
        kv_dtype: str | None = None,
        tp: int = 1,
        overhead: Overhead = CPU_DRIVEN,
    ) -> None:
        if tp > 1 and not hardware.collective:
            raise ConfigError(f"{hardware.name} has no links between devices for tp={tp}")
        if tp > 1 and shape.recurrent is not None:
            raise ConfigError(f"the recurrent layers of {shape.name} are not split over tp={tp}")
        if shape.heads % tp:
            raise ConfigError(f"{shape.heads} heads of {shape.name} cannot be split over tp={tp}")
        flops = hardware.peak(dtype) * tp
        size = BYTES[dtype]
        kv_dtype = kv_dtype or ("bf16" if size < 2 else dtype)
        if kv_dtype not in KV_BYTES:
            raise ConfigError(f"unknown KV dtype '{kv_dtype}'; known: {', '.join(KV_BYTES)}")
        bandwidth = hardware.bandwidth * tp
        self.shape, self.hardware, self.tp = shape, hardware, tp
        self.dtype, self.kv_dtype = dtype, kv_dtype
        self.layers = shape.layers
        self.overhead = overhead

        active = shape.layers * shape.active_layer_parameters + shape.recurrent_more
        self._dense_token_s = 2 * active / flops
        always = shape.dense_parameters
        always += 0 if shape.experts else shape.expert_parameters
        self._dense_read_s = (shape.layers * always + shape.recurrent_more) * size / bandwidth
        self._expert_read_s = (
            shape.layers * shape.experts * shape.expert_parameters * size / bandwidth
        )
        self._miss = 1 - shape.experts_per_token / shape.experts if shape.experts else 1.0

        pair_flops = 4 * shape.attention_width
        kv_layer_bytes = 2 * shape.kv_width * KV_BYTES[kv_dtype]
        attending = shape.attention_layers
        self._pair_s = pair_flops * attending / flops
        self._context_s = kv_layer_bytes * attending / bandwidth
        self._full_layers = (attending - shape.window_layers) / attending
        self._state_s = 2 * shape.state_bytes / bandwidth
        state_flops = 0 if shape.recurrent is None else shape.recurrent.token_flops
        self._state_token_s = state_flops / flops
        self._window = float("inf") if shape.window is None else float(shape.window)

        host = hardware.host
        self._host_context_s = (
            0.0
            if host is None
            else attending * max(kv_layer_bytes / host.bandwidth, pair_flops / host.flops)
        )
        link = hardware.link * tp
        self._move_s = kv_layer_bytes * attending / link if link else 0.0
        self._query_s = shape.attention_width * size * attending / link if link else 0.0

        wire = 2 * (tp - 1) / tp * shape.hidden * max(size, 2.0)
        self._collective_s = 0.0 if tp == 1 else 2 * shape.layers * ALL_REDUCE_S
        self._collective_token_s = 0.0 if tp == 1 else 2 * shape.layers * wire / hardware.collective
        self._embedding_s = 2 * shape.hidden * max(size, 2.0) / hardware.bandwidth
        self._head_read_s = shape.head_parameters * size / bandwidth
        self._head_token_s = 2 * shape.head_parameters / flops
        self._sampling_s = 2 * 4 * shape.vocab / hardware.bandwidth

    def terms(self, work: Work) -> Terms:
        """Seconds of each part.

        Raises:
            ConfigError: work for the host or moves where the hardware has no host.
        """
        tokens = work.tokens
        moved = work.out_tokens or work.in_tokens or work.host_decodes
        if moved and self.hardware.host is None:
            raise ConfigError(f"{self.hardware.name} has no host to keep KV")
        move = 0.0
        if moved:
            queries = work.host_decodes * self._query_s  # out: queries; in: what attention gave
            move = max(work.out_tokens, work.in_tokens) * self._move_s + queries
        if not tokens:
            return Terms(kv_move=move, piggybacked=work.piggyback_layers * PIGGYBACK_LAYER_S)
        read = self._dense_read_s
        if self._expert_read_s:
            read += self._expert_read_s * (1 - self._miss**tokens)
        compute = tokens * self._dense_token_s
        prefill = decode = 0.0
        if work.prefills:
            prefill = max(
                work.prefill_area * self._share(work.prefill_context, work.prefills) * self._pair_s,
                self._kept(work.prefill_context, work.prefills) * self._context_s,
            )
            prompts = tokens - work.decodes - work.host_decodes
            prefill += max(work.prefills * self._state_s, prompts * self._state_token_s)
        if work.decodes:
            kept = self._kept(work.decode_context, work.decodes)
            decode = kept * max(self._context_s, self._pair_s)
            decode += work.decodes * max(self._state_s, self._state_token_s)
        sampled = work.sampled
        return Terms(
            tokens * self._embedding_s,
            compute if compute > read else read,
            prefill,
            decode,
            self._kept(work.host_context, work.host_decodes) * self._host_context_s
            if work.host_decodes
            else 0.0,
            move,
            self._collective_s + tokens * self._collective_token_s,
            max(self._head_read_s, sampled * self._head_token_s) if sampled else 0.0,
            sampled * self._sampling_s,
            self.overhead.step_s
            + (work.prefills + work.decodes + work.host_decodes) * self.overhead.row_s,
            work.piggyback_layers * PIGGYBACK_LAYER_S,
        )

    def _kept(self, context: int, rows: int) -> float:
        """Tokens read of ``rows`` contexts, averaged over full and sliding layers."""
        seen = rows * self._window
        if context <= seen:
            return context
        return self._full_layers * context + (1 - self._full_layers) * seen

    def _share(self, context: int, rows: int) -> float:
        """The share of pairs of query and key that lie within the windows."""
        return self._kept(context, rows) / context

    def kv_room(self, usable: float = 0.9) -> int:
        """Tokens of KV that fit beside the weights, all devices together.

        Args:
            usable: the share of memory that may be filled; vLLM's default, too.

        Raises:
            OutOfMemoryError: the weights alone do not fit; says by how many bytes.
        """
        weights = self.shape.parameters * BYTES[self.dtype]
        room = usable * self.hardware.memory * self.tp - weights
        if room < 0:
            raise OutOfMemoryError(
                f"{self.shape.name} in {self.dtype} needs {weights:.0f} bytes for its weights; "
                f"{usable:.0%} of {self.tp} x {self.hardware.name} is {-room:.0f} bytes short"
            )
        return int(room / self.kv_token_bytes)

    @property
    def kv_token_bytes(self) -> float:
        """Bytes of a token's K and V in all layers."""
        return self.shape.kv_values_per_token * KV_BYTES[self.kv_dtype]

    @property
    def state_tokens(self) -> int:
        """As large as the KV of so many tokens is a slot of recurrent state."""
        return round(self.shape.state_bytes / self.kv_token_bytes)
