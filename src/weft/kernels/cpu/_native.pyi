"""Types of the native extension."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

_View = tuple[int, int, tuple[int, ...], tuple[int, ...]]

def paged_attention(
    out: _View,
    q: _View,
    k: _View | None,
    v: _View | None,
    k_cache: _View,
    v_cache: _View,
    block_tables: _View,
    query_start: _View,
    seq_lens: _View,
    slot_mapping: _View,
    block_size: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: _View | None,
    causal: bool,
) -> None: ...
def read_all(data: int, words: int) -> int: ...
def multiply_adds(format: int, rounds: int) -> int: ...
def meet(phases: int, rounds: int, work: int) -> None: ...
def threads() -> int: ...
def set_threads(threads: int, cpus: list[int], nodes: list[int]) -> None: ...
def product_items(outputs: int, gated: bool, rows: int, threads: int) -> int: ...
def share_begin(items: int, share: int, shares: int) -> int: ...
def isa() -> str: ...
def machine_isas() -> list[str]: ...
def isas() -> list[str]: ...
def use_isa(isa: str) -> None: ...

class Mixer:
    def advance(
        self,
        matrices: int,
        inputs: int,
        bounds: NDArray[np.int32],
        reads: NDArray[np.int32],
        writes: NDArray[np.int32],
        marks: NDArray[np.int32],
        x: _View,
        gates: _View,
        out: int,
        /,
    ) -> None: ...

class Delta(Mixer):
    def __init__(
        self,
        shape: tuple[int, ...],
        weights: tuple[int, ...],
        epsilon: float,
        sigmoid: bool,
        floor: float,
        /,
    ) -> None: ...

class Conv(Mixer):
    def __init__(self, shape: tuple[int, ...], weights: tuple[int, ...], /) -> None: ...

class Mamba2(Mixer):
    def __init__(
        self, shape: tuple[int, ...], weights: tuple[int, ...], numbers: tuple[float, ...], /
    ) -> None: ...

layout_version: int

MatrixForm = tuple[int, int, int, bool, int, int, int, bool, bool, bool]

class Matrix:
    @staticmethod
    def pack(pieces: list[_View], gated: bool) -> Matrix: ...
    @staticmethod
    def quantised(form: MatrixForm) -> Matrix: ...
    @staticmethod
    def mapped(form: MatrixForm, data: int, bytes: int, owner: object) -> Matrix: ...
    @property
    def form(self) -> MatrixForm: ...
    @property
    def data(self) -> int: ...
    def write(
        self,
        first: int,
        rows: int,
        values: int,
        scales: int,
        zeros: int,
        minimums: int = 0,
        steps: int = 0,
        minimum_steps: int = 0,
    ) -> None: ...
    def write_rounded(self, first: int, rows: int, data: int, type: int, stride: int) -> None: ...
    @property
    def bytes(self) -> int: ...
    @property
    def format(self) -> int: ...
    def linear(
        self, x: int, x_stride: int, rows: int, bias: int, out: int, out_type: int
    ) -> None: ...
    def gather(self, outputs: int, count: int, to: int) -> None: ...

class Packer:
    def __init__(
        self, tokens: NDArray[np.int32], tables: list[NDArray[np.int32]], block_size: int
    ) -> None: ...
    def write_to(
        self,
        numbers: NDArray[np.int64],
        bounds: NDArray[np.int32],
        slot_mapping: list[NDArray[np.int64]],
        block_tables: list[NDArray[np.int32]],
    ) -> None: ...
    def pack(
        self,
        rows: tuple[int, ...],
        starts: tuple[int, ...],
        counts: tuple[int, ...],
        samples: tuple[bool, ...],
        guessed: tuple[int, ...],
    ) -> tuple[int, int, int, int]: ...
    def pack_tables(
        self,
        windows: list[int],
        blocks: NDArray[np.int32],
        starts: NDArray[np.int32],
        ahead: int = 0,
    ) -> int: ...

PENALTIES: tuple[str, ...]
SETTINGS: tuple[str, ...]

def sample(
    logits: int,
    size: int,
    settings: NDArray[np.float64],
    draws: NDArray[np.float64],
    tokens: NDArray[np.int64],
    finite: NDArray[np.bool_],
) -> None: ...
def penalise(
    logits: int,
    size: int,
    at: NDArray[np.int64],
    tokens: NDArray[np.int32],
    rows: NDArray[np.int64],
    lengths: NDArray[np.int64],
    num_prompt: NDArray[np.int64],
    penalties: NDArray[np.float32],
) -> None: ...
def uniform(
    seeds: NDArray[np.int64], counters: NDArray[np.int64], numbers: NDArray[np.float64]
) -> None: ...

class Experts:
    activation: int
    limit: float
    gate_up_bias: int
    down_bias: int
    def add(self, gate_up: Matrix, down: Matrix) -> None: ...

given_up: int

class ExpertServer:
    def __init__(
        self,
        asked: int,
        tokens: int,
        x: _View,
        ids: int,
        shares: int,
        top_k: int,
        answered: int,
        out: int,
        layers: list[Experts],
    ) -> None: ...
    def run(self) -> None: ...
    def wake(self) -> None: ...
    def stop(self) -> None: ...
    @property
    def answers(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def busy_ns(self) -> int: ...

class Routing:
    top_k: int
    normalise: bool
    sigmoid: bool
    groups: int
    top_groups: int
    group_best: int
    scale: float
    bias: int

def route(scores: _View, routing: Routing, ids: int, shares: int) -> None: ...
def moe(experts: Experts, x: _View, ids: int, shares: int, top_k: int, out: int) -> None: ...

class Latent:
    query_up: Matrix
    query_norm: int
    row_norm: int
    rotated: int
    epsilon: float
    def add_head(self, key_up: Matrix, value_up: Matrix, /) -> None: ...

class Layer:
    latent: Latent
    qkv: Matrix
    output: Matrix
    output_gate: Matrix
    gating: int
    gate_up: Matrix
    down: Matrix
    activation_numbers: int
    limit: float
    heads: int
    kv_heads: int
    head_size: int
    epsilon: float
    post_epsilon: float
    activation: int
    value_is_key: bool
    value_norm: bool
    value_size: int
    value_scale: float
    qk_norm_whole: bool
    qk_norm_rotated: bool
    residual_scale: float
    centred: bool
    parallel: bool
    norms_sums: bool
    own_query_angles: bool
    state_gates: Matrix
    state_gate_up: Matrix
    forget_up: Matrix
    mixer_inputs: int
    mixer_gates: int
    mixer: Mixer
    router: Matrix
    experts: Experts
    routing: Routing
    float_scores: bool
    mlp_gate: bool
    router_factor: float
    input_gate: Matrix
    input_projection: Matrix
    scalar: float
    qkv_bias: int
    output_bias: int
    gate_up_bias: int
    down_bias: int
    router_bias: int
    input_norm: int
    qk_norm: int
    post_attention_norm: int
    post_attention_norm_bias: int
    mlp_norm: int
    post_mlp_norm: int
    post_mlp_norm_bias: int
    expert_scale: int
    router_scale: int
    expert_norm: int
    dense_post_norm: int
    expert_post_norm: int
    post_input_norm: int
    def pre(
        self, residual: int, tokens: int, cos: int, sin: int, half: int, qkv: int, /
    ) -> None: ...
    def post(
        self,
        attended: int,
        residual: int,
        inputs: int,
        input_stride: int,
        tokens: int,
        out: int,
        /,
    ) -> None: ...

class Stack:
    packed: Matrix | None
    table: _View
    embedding_scale: float
    final_norm: int
    epsilon: float
    centred: bool
    embedding_norm: bool
    def add_rope(
        self,
        frequencies: int,
        half: int,
        scale: float,
        query_scales: int,
        query_scale_count: int,
        query_step: int,
        /,
    ) -> None: ...
    def add_layer(
        self,
        layer: Layer,
        rope: int,
        group: int,
        k_cache: _View,
        v_cache: _View,
        scale: float,
        window: int,
        softcap: float,
        sinks: _View | None,
        causal: bool,
        /,
    ) -> None: ...
    def add_recurrent(self, layer: Layer, matrices: int, inputs: int, slots: int, /) -> None: ...
    def add_inputs(
        self,
        table: _View,
        projection: Matrix,
        norm: int,
        width: int,
        table_scale: float,
        projection_scale: float,
        sum_scale: float,
        /,
    ) -> None: ...
    def run(
        self,
        ids: int,
        positions: int,
        tokens: int,
        groups: list[tuple[_View, _View, _View, _View, int]],
        hidden: int,
        embedded: int,
        /,
    ) -> None: ...
    def run_recurrent(
        self,
        ids: int,
        positions: int,
        tokens: int,
        groups: list[tuple[_View, _View, _View, _View, int]],
        bounds: NDArray[np.int32],
        reads: NDArray[np.int32],
        writes: NDArray[np.int32],
        marks: NDArray[np.int32],
        hidden: int,
        /,
    ) -> None: ...
    def run_carrying(
        self,
        ids: int,
        positions: int,
        tokens: int,
        groups: list[tuple[_View, _View, _View, _View, int]],
        hidden: int,
        rows: CarriedRows,
        begun: NDArray[np.int32],
        limits: NDArray[np.int32],
        most: int,
        /,
    ) -> int: ...

class CarriedRows:
    def __init__(
        self, client: MailboxClient, slots: int, residuals: int, row_bytes: int, waits: int, /
    ) -> None: ...
    def add_angles(self, cos: int, sin: int, half: int, /) -> None: ...
    @property
    def spent_ns(self) -> int: ...
    def taken(self) -> list[int]: ...
    def clear(self) -> None: ...

def angles(
    positions: int,
    tokens: int,
    frequencies: int,
    half: int,
    scale: float,
    cos: int,
    sin: int,
    /,
) -> None: ...
def heads(matrices: list[Matrix], x: _View, out: int) -> None: ...
def normalise(
    x: _View, weight: _View | None, plus_one: bool, epsilon: float, centred: bool, out: int
) -> None: ...
def square_sums(x: _View, first: int, sums: int) -> None: ...
def normalise_by(
    x: _View,
    first: int,
    sums: int,
    weight: _View,
    plus_one: bool,
    epsilon: float,
    ranks: int,
    out: int,
) -> None: ...
def rotate(x: _View, cos: int, sin: int, half: int, out: int) -> None: ...
def act_mul(gate_up: _View, activation: int, limit: float, out: int) -> None: ...
def activate(x: _View, activation: int, numbers: int, out: int) -> None: ...
def gate(x: _View, gates: _View, gating: int, out: int) -> None: ...
def gather_rows(table: _View, ids: int, tokens: int, out: int) -> None: ...
def copy_blocks(
    sources: NDArray[np.int64],
    targets: NDArray[np.int64],
    block_bytes: int,
    from_: NDArray[np.int64],
    to: NDArray[np.int64],
) -> None: ...
def softcap(numbers: int, count: int, cap: float) -> None: ...

# k_cache, v_cache, heads, head size, group, writes, scale, window, softcap, sinks
HostLayer = tuple[_View, _View, int, int, int, bool, float, int, float, tuple[float, ...]]

class Mailbox:
    def __init__(self, address: int, bytes: int) -> None: ...
    @staticmethod
    def bytes_of(sizes: list[int]) -> int: ...
    @staticmethod
    def format(address: int, bytes: int, sizes: list[int]) -> None: ...
    @property
    def worker(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def type(self) -> int: ...
    def counters(self) -> list[int]: ...
    def states(self, room: NDArray[np.int32]) -> None: ...
    def waiting(self) -> int: ...
    def layout(self) -> list[int]: ...
    def reclaim(self, worker: int) -> None: ...

class MailboxClient:
    def __init__(self, mailbox: Mailbox) -> None: ...
    def begin(
        self,
        slots: NDArray[np.int32],
        contexts: NDArray[np.int32],
        tables: list[_View],
        places: NDArray[np.int32] | None,
    ) -> None: ...
    def submit(
        self, slots: NDArray[np.int32], layer: int, q: _View, k: _View | None, v: _View | None
    ) -> None: ...
    def done(self, layer: int, room: NDArray[np.int32]) -> int: ...
    def done_counts(self, room: NDArray[np.int32]) -> None: ...
    def failed(self) -> list[tuple[int, int]]: ...
    def take(self, slots: NDArray[np.int32], layer: int, out: _View) -> None: ...
    def release(self, slots: NDArray[np.int32]) -> None: ...
    def put_back(self, slots: NDArray[np.int32]) -> None: ...
    def abort(self, slots: NDArray[np.int32]) -> list[int]: ...
    def wait(self, timeout_ns: int) -> bool: ...
    def wait_for_first(self, timeout_ns: int) -> bool: ...
    def wait_for(self, slots: NDArray[np.int32], timeout_ns: int) -> bool: ...

class Lane:
    def __init__(self, client: MailboxClient) -> None: ...
    def begin(
        self,
        stack: Stack,
        ids: int,
        positions: int,
        tokens: int,
        parts: list[tuple[Stack, int, list[tuple[_View, _View, _View, _View, int]]]],
        rows: list[int],
        /,
    ) -> None: ...
    def enter(self, layer: int, /) -> None: ...
    def leave(self, layer: int, /) -> None: ...
    def fail(self, rows: list[int], /) -> None: ...
    def finish(self, hidden: int, /) -> None: ...

class Courier:
    def __init__(self, mailbox: Mailbox, place: int) -> None: ...
    def claim(self, slots: NDArray[np.int32], orders: NDArray[np.uint64]) -> tuple[int, int]: ...
    def holds(self, slot: int, order: int, layer: int) -> bool: ...
    def finish(self, slots: NDArray[np.int32], layer: int) -> None: ...
    def forget(self, slots: NDArray[np.int32]) -> None: ...
    def give_up(self) -> None: ...
    def wait(self, seen: int, timeout_ns: int) -> int: ...
    def wake(self) -> None: ...
    @property
    def jobs(self) -> int: ...
    @property
    def round_trip_ns(self) -> int: ...

class HostWorker:
    def __init__(
        self, mailbox: Mailbox, layers: list[HostLayer], threads: int, cpus: list[int]
    ) -> None: ...
    def attach(self) -> None: ...
    def run(self) -> None: ...
    def stop(self) -> None: ...

class Lease:
    def grant(self, outlet: object | None) -> None: ...
    def recall(self) -> None: ...

class Outlet:
    def __init__(self, capsule: object) -> None: ...
    def asked(self) -> bool: ...
    def publish(self, ids: NDArray[np.uint64], tokens: NDArray[np.int64]) -> None: ...

class Stamps:
    def __init__(self) -> None: ...
    @property
    def outlet(self) -> object: ...
    def take(self) -> list[tuple[int, list[int]]]: ...

class RowEdits:
    def __init__(
        self,
        edited: NDArray[np.bool_],
        penalised: NDArray[np.bool_],
        penalties: NDArray[np.float32],
        num_prompt: NDArray[np.int64],
        biased: NDArray[np.int64],
        biased_from: NDArray[np.int64],
        biases: NDArray[np.float32],
        delayed: NDArray[np.int64],
        delayed_from: NDArray[np.int64],
        min_tokens: NDArray[np.int64],
    ) -> None: ...

class DecodeLoop:
    def __init__(
        self,
        stack: Stack,
        head: Matrix,
        logit_scale: float,
        softcap: float,
        tokens: NDArray[np.int32],
        length: NDArray[np.int64],
        tables: list[NDArray[np.int32]],
        block_size: int,
    ) -> None: ...
    def run(
        self,
        lease: Lease,
        rows: NDArray[np.int64],
        ids: NDArray[np.uint64],
        settings: NDArray[np.float64],
        seeds: NDArray[np.int64],
        counters: NDArray[np.int64],
        stop_ids: NDArray[np.int64],
        stop_from: NDArray[np.int64],
        given: NDArray[np.int64],
        edits: RowEdits,
        guest: NDArray[np.bool_],
        withheld: NDArray[np.bool_],
        choose: Callable[[NDArray[np.float32], NDArray[np.int64], NDArray[np.bool_]], bool] | None,
        now: NDArray[np.int32],
        spare: NDArray[np.int32],
        kept: NDArray[np.bool_],
        every: NDArray[np.int64],
        steps: int,
        limit_ns: int,
        unpublished_ns: int,
        step_ns: int,
    ) -> tuple[list[list[int]], list[bool], bool, int]: ...
