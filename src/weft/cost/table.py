"""Costs from measured GPU kernels: the tables of aiconfigurator-core, an optional extra."""

from __future__ import annotations

from weft.core.errors import ConfigError
from weft.cost.curves import Curve, Grid
from weft.cost.hardware import HARDWARE, Hardware
from weft.cost.measured_tables import MeasuredCurve, Surface, Tables
from weft.cost.model import Terms
from weft.cost.roofline import CPU_DRIVEN, Overhead, Roofline
from weft.cost.shape import ModelShape
from weft.cost.work import Work

SYSTEMS = {
    "a100": "a100_sxm",
    "omniserve-a100": "a100_sxm",
    "h100": "h100_sxm",
    "blink-h100": "h100_sxm",
    "neo-h100": "h100_sxm",
    "h200": "h200_sxm",
    "l40s": "l40s",
}
DTYPES = {"bf16": "bfloat16", "fp16": "bfloat16", "fp8": "fp8"}  # half types are equally fast
LARGEST = 32768  # tokens of a step, up to which the dense curve is laid out


class MeasuredCosts:
    """A cost model from measured kernels; what was not measured is the roofline's.

    - dense, head: products of every layer by (tokens, outputs, inputs). Norms with their residuals
      and the activation, which are not measured, move their bytes at the share of bandwidth, and
      with the constant, that the package's sheet gives for such kernels.
    - decode attention: by (decodes, mean context); more KV heads than were measured are as many
      more requests of fewer heads, since a kernel treats both alike.
    - prefill attention: by (prompts, pairs of each). A chunk with KV before it is taken as a prompt
      with equally many pairs, or as the time to read that KV, whichever is longer.
    - experts: by tokens, for experts chosen with a power law (the package's milder one).
    - collectives: two measured all-reduces a layer, in a graph; the roofline's where the devices
      are joined otherwise than those measured.
    - CPU attention, KV moves, embedding, sampling, host overhead: the roofline's.

    Raises:
        ConfigError: no tables for this hardware, dtype or shape, or the extra is not installed.
    """

    def __init__(
        self,
        shape: ModelShape,
        hardware: Hardware,
        dtype: str = "bf16",
        kv_dtype: str | None = None,
        tp: int = 1,
        overhead: Overhead = CPU_DRIVEN,
        backend: str = "vllm",
    ) -> None:
        if hardware.name not in SYSTEMS:
            known = ", ".join(SYSTEMS)
            raise ConfigError(f"there are no measured tables for {hardware.name}; but for: {known}")
        if dtype not in DTYPES:
            raise ConfigError(f"no kernels were measured in {dtype}; but in: {', '.join(DTYPES)}")
        if shape.window is not None:
            raise ConfigError(f"no tables for the sliding window of {shape.name}")
        if shape.kv_heads % tp:
            raise ConfigError(f"{shape.kv_heads} KV heads cannot be split over {tp} devices")
        self.roofline = Roofline(shape, hardware, dtype, kv_dtype, tp, overhead)
        self.tables = Tables(SYSTEMS[hardware.name], backend)
        self.layers = shape.layers
        self.shape, self.tp = shape, tp
        self._dense, self._head = self._products(DTYPES[dtype])
        heads, kv_heads = shape.heads // tp, shape.kv_heads // tp
        kv = DTYPES.get(self.roofline.kv_dtype, self.roofline.kv_dtype)
        self._prefill = _attention(self.tables, "context", heads, kv_heads, shape.head_size, kv)
        self._decode = _attention(self.tables, "generation", heads, kv_heads, shape.head_size, kv)
        measured = HARDWARE[next(name for name in SYSTEMS if SYSTEMS[name] == self.tables.system)]
        joined = hardware.collective == measured.collective
        self._reduce = self._all_reduces() if tp > 1 and joined else None

    def terms(self, work: Work) -> Terms:
        """Seconds of each part; raises as the roofline does."""
        bound = self.roofline.terms(work)
        if not work.tokens:
            return bound
        layers = self.layers
        prefill = decode = 0.0
        if work.prefills:
            measured = layers * self._prefill.at(work.prefills, work.prefill_area)
            prefill = max(measured, bound.prefill_attention)
        if work.decodes:
            decode = layers * self._decode.at(work.decodes, work.decode_context)
        return bound._replace(
            dense=self._dense.at(work.tokens),
            prefill_attention=prefill,
            decode_attention=decode,
            collectives=bound.collectives if self._reduce is None else self._reduce.at(work.tokens),
            head=self._head.at(work.sampled) if work.sampled else 0.0,
        )

    def _products(self, dtype: str) -> tuple[Curve, Curve]:
        """Dense seconds of all layers by tokens, and of the head by sampled rows."""
        shape, tp = self.shape, self.tp
        rows = self.tables.read("gemm", "gemm_perf.parquet", ("m", "n", "k"), gemm_dtype=dtype)
        by_tokens: dict[int, dict[tuple[int, int], float]] = {}
        for tokens, outputs, inputs, seconds in rows:
            if tokens <= LARGEST:
                by_tokens.setdefault(tokens, {})[outputs, inputs] = seconds
        surfaces = {tokens: Surface(points) for tokens, points in sorted(by_tokens.items())}
        attention = shape.attention_width // tp
        products = [
            (attention + 2 * shape.kv_width // tp, shape.hidden),
            (shape.hidden, attention),
        ]
        experts = None
        if shape.experts:
            products.append((shape.experts, shape.hidden))
            experts = self._experts(dtype)
        if dense := shape.shared if shape.experts else shape.intermediate:
            inner = dense // tp
            products += [(2 * inner, shape.hidden), (shape.hidden, inner)]
        layer = {
            tokens: sum(surface.at(*product) for product in products)
            + self._elementwise(tokens)
            + (experts.at(tokens) if experts else 0.0)
            for tokens, surface in surfaces.items()
        }
        head = {n: one.at(shape.vocab // tp, shape.hidden) for n, one in surfaces.items()}
        return (
            Curve(tuple(layer), tuple(self.layers * seconds for seconds in layer.values())),
            Curve(tuple(head), tuple(head.values())),
        )

    def _elementwise(self, tokens: int) -> float:
        """Two norms with residuals and one gated activation, in the kernels of one layer.

        The package's own description of a layer (``sdk/models/llama.py``) counts the same three,
        each reading and writing twice the hidden size, and three times the inner size.
        """
        gpu, shape = self.tables.gpu, self.shape
        active = max(1, shape.experts_per_token)
        inner = active * shape.intermediate + shape.shared
        values = 2 * 4 * shape.hidden + 3 * inner // self.tp
        rate = gpu["mem_bw"] * gpu["mem_bw_empirical_scaling_factor"]
        return float(3 * gpu["mem_empirical_constant_latency"] + 2 * tokens * values / rate)

    def _experts(self, dtype: str) -> MeasuredCurve:
        """Seconds of one layer's experts by tokens."""
        shape = self.shape
        rows = self.tables.read(
            "moe",
            "moe_perf.parquet",
            ("num_tokens",),
            moe_dtype=dtype,
            hidden_size=shape.hidden,
            inter_size=shape.intermediate,
            topk=shape.experts_per_token,
            num_experts=shape.experts,
            moe_tp_size=self.tp,
            moe_ep_size=1,
            distribution="power_law_1.01",
        )
        return MeasuredCurve(dict(rows))

    def _all_reduces(self) -> Curve:
        """Seconds of two all-reduces a layer by tokens; messages are measured in values."""
        backend = f"{self.tables.backend}_graph"
        rows = self.tables.read(
            "comm",
            "custom_allreduce_perf.parquet",
            ("message_size",),
            num_gpus=self.tp,
            backend=backend,
        )
        line = MeasuredCurve(dict(rows))
        sizes = self._dense.tokens
        times = (2 * self.layers * line.at(tokens * self.shape.hidden) for tokens in sizes)
        return Curve(sizes, tuple(times))


def _attention(
    tables: Tables, phase: str, heads: int, kv_heads: int, head_size: int, kv_dtype: str
) -> Grid:
    """Seconds of one layer's attention, by requests and by context or pairs of each.

    Between measured numbers of query heads time is taken as linear.
    """
    decode = phase == "generation"
    sizes = ("batch_size", "step" if decode else "isl")
    rows = tables.read(
        "attention",
        f"{phase}_attention_perf.parquet",
        ("num_heads", "num_key_value_heads", *sizes),
        head_dim=head_size,
        kv_cache_dtype=kv_dtype,
        window_size=0,
    )
    groups = {kv for _, kv, *_ in rows}
    fold = next(f for f in range(1, kv_heads + 1) if not kv_heads % f and kv_heads // f in groups)
    heads, kv_heads = heads // fold, kv_heads // fold
    measured: dict[int, dict[tuple[int, int], float]] = {}
    for query_heads, kv, requests, length, seconds in rows:
        if kv == kv_heads:
            measured.setdefault(query_heads, {})[requests, length] = seconds
    below = max((n for n in measured if n <= heads), default=None)
    above = min((n for n in measured if n >= heads), default=None)
    if below is None or above is None:
        raise ConfigError(f"no attention of {heads} heads on {kv_heads} was measured")
    low, high = Surface(measured[below]), Surface(measured[above])
    share = (heads - below) / (above - below) if above > below else 0.0
    requests = tuple(sorted({n for n, _ in measured[below]}))
    lengths = tuple(sorted({length for _, length in measured[below]}))
    times = tuple(
        tuple(
            (1 - share) * low.at(n * fold, length) + share * high.at(n * fold, length)
            for length in lengths
        )
        for n in requests
    )
    # A decode's context is what was there before and itself; a prompt has half its square in pairs.
    edges = tuple(length + 1 if decode else length * length / 2 for length in lengths)
    return Grid(requests, edges, times)
