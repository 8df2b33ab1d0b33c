"""Types of the native extension."""

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
) -> None: ...
def read_all(data: int, words: int) -> int: ...
def threads() -> int: ...
def set_threads(threads: int, pinned: bool = ...) -> None: ...
def isa() -> str: ...
def isas() -> list[str]: ...
def use_isa(isa: str) -> None: ...

class Matrix:
    @staticmethod
    def pack(
        data: int, type: int, outputs: int, inputs: int, stride: int, gated: bool
    ) -> Matrix: ...
    @staticmethod
    def quantised(
        format: int,
        outputs: int,
        inputs: int,
        gated: bool,
        type: int,
        group: int,
        scale_type: int,
        zeros: bool,
    ) -> Matrix: ...
    def write(self, first: int, rows: int, values: int, scales: int, zeros: int) -> None: ...
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
        self, windows: list[int], blocks: NDArray[np.int32], starts: NDArray[np.int32]
    ) -> int: ...

SETTINGS: tuple[str, ...]

def sample(
    logits: int,
    size: int,
    settings: NDArray[np.float64],
    draws: NDArray[np.float64],
    tokens: NDArray[np.int64],
    finite: NDArray[np.bool_],
) -> None: ...
def uniform(
    seeds: NDArray[np.int64], counters: NDArray[np.int64], numbers: NDArray[np.float64]
) -> None: ...

class Layer:
    qkv: Matrix
    output: Matrix
    gate_up: Matrix
    down: Matrix
    heads: int
    kv_heads: int
    head_size: int
    epsilon: float
    activation: int
    qkv_bias: int
    output_bias: int
    gate_up_bias: int
    down_bias: int
    input_norm: int
    qk_norm: int
    post_attention_norm: int
    mlp_norm: int
    post_mlp_norm: int
    def pre(
        self, residual: int, tokens: int, cos: int, sin: int, half: int, qkv: int, /
    ) -> None: ...
    def post(self, attended: int, residual: int, tokens: int, out: int, /) -> None: ...

class Stack:
    packed: Matrix | None
    table: _View
    embedding_scale: float
    final_norm: int
    epsilon: float
    def add_rope(self, frequencies: int, half: int, scale: float, /) -> None: ...
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
        /,
    ) -> None: ...
    def run(
        self,
        ids: int,
        positions: int,
        tokens: int,
        groups: list[tuple[_View, _View, _View, _View, int]],
        hidden: int,
        /,
    ) -> None: ...

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
def normalise(x: _View, weight: _View | None, plus_one: bool, epsilon: float, out: int) -> None: ...
