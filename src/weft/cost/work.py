"""Tallies the work of a sub-batch for cost models; sequences join and leave in O(1)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.core.plan import SubBatch, Tier


@dataclass(slots=True)
class Work:
    """The work of a sub-batch, as sums over its rows.

    A row computes ``count`` tokens c after ``start`` tokens s whose KV exists. A count of 1 with a
    start above 0 is a decode with context n = s + 1; everything else counts as prefill.

    Attributes:
        tokens: rows of the dense layers.
        sampled: rows of the head.
        prefills: rows that prefill.
        prefill_area: sum of c * (s + c / 2): pairs of query and key (OmniServe section 4.2).
        prefill_context: sum of s + c: tokens whose KV prefill reads.
        decodes, decode_context: decodes in device memory, and the sum of their n.
        host_decodes, host_context: the same for decodes whose KV lies in host memory.
        out_tokens, in_tokens: tokens whose KV (all layers) moves to the host, and to the device.
            Rows in the host tier count what their attention moves; swaps are added by who plans
            them.
        piggyback_layers: layers that piggybacked rows go through with the step, summed over the
            piggybacked rows; their rows of the dense layers are not counted.
    """

    tokens: int = 0
    sampled: int = 0
    prefills: int = 0
    prefill_area: float = 0.0
    prefill_context: int = 0
    decodes: int = 0
    decode_context: int = 0
    host_decodes: int = 0
    host_context: int = 0
    out_tokens: int = 0
    in_tokens: int = 0
    piggyback_layers: int = 0

    @classmethod
    def of(cls, batch: SubBatch) -> Work:
        """The tally of a planned sub-batch; drafts are computed and verified like its tokens."""
        work = cls()
        drafts, tiers = batch.drafts, batch.tiers or (Tier.DEVICE,) * len(batch.rows)
        for row, start, count, samples, tier in zip(
            batch.rows, batch.starts, batch.counts, batch.samples, tiers, strict=True
        ):
            drafted = len(drafts.get(row, ()))
            work.add(start, count + drafted, samples + drafted, tier)
        return work

    def add(
        self, start: int, count: int, sampled: int = True, tier: Tier = Tier.DEVICE, sign: int = 1
    ) -> None:
        """Count a row in: ``count`` tokens after ``start``, of which ``sampled`` need logits.

        Of a row in the host tier, a decode's own K and V go to the host; a prefill chunk is
        computed on the device: the KV before it comes in, its own goes out (NEO section 3.2).
        """
        self.tokens += sign * count
        self.sampled += sign * sampled
        if count == 1 and start:
            if tier is Tier.HOST:
                self.host_decodes += sign
                self.host_context += sign * (start + 1)
                self.out_tokens += sign
            else:
                self.decodes += sign
                self.decode_context += sign * (start + 1)
            return
        self.prefills += sign
        self.prefill_area += sign * count * (start + 0.5 * count)
        self.prefill_context += sign * (start + count)
        if tier is Tier.HOST:
            self.out_tokens += sign * count
            self.in_tokens += sign * start

    def remove(self, start: int, count: int, sampled: int = True, tier: Tier = Tier.DEVICE) -> None:
        """Take out a row that ``add`` counted in with the same arguments, exactly."""
        self.add(start, count, sampled, tier, -1)

    def copy(self) -> Work:
        return replace(self)

    def joined(self, other: Work) -> Work:
        """The tally of both together, as a new one."""
        return Work(
            self.tokens + other.tokens,
            self.sampled + other.sampled,
            self.prefills + other.prefills,
            self.prefill_area + other.prefill_area,
            self.prefill_context + other.prefill_context,
            self.decodes + other.decodes,
            self.decode_context + other.decode_context,
            self.host_decodes + other.host_decodes,
            self.host_context + other.host_context,
            self.out_tokens + other.out_tokens,
            self.in_tokens + other.in_tokens,
            self.piggyback_layers + other.piggyback_layers,
        )
