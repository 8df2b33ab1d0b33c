"""Types of the native extension."""

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
    context_len: _View,
    slots: _View,
    block_size: int,
    scale: float,
    window: int,
    softcap: float,
) -> None: ...
def threads() -> int: ...
def set_threads(threads: int) -> None: ...
def isa() -> str: ...
def isas() -> list[str]: ...
def use_isa(isa: str) -> None: ...

class Matrix:
    @staticmethod
    def pack(
        data: int, type: int, outputs: int, inputs: int, stride: int, gated: bool
    ) -> Matrix: ...
    @property
    def bytes(self) -> int: ...
    @property
    def format(self) -> int: ...
    def linear(
        self, x: int, x_stride: int, rows: int, bias: int, out: int, out_type: int
    ) -> None: ...
    def gather(self, outputs: int, count: int, to: int) -> None: ...
