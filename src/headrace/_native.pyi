from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PAGE_SIZE: int

def available_isas() -> list[str]: ...
def run_linear(
    isa: str, weight: Weight, bias: Weight | None, x: NDArray[np.float32]
) -> NDArray[np.float32]: ...
def run_exp(isa: str, x: NDArray[np.float32]) -> NDArray[np.float32]: ...
def run_read_sum(isa: str, weight: Weight, pool: Pool) -> int: ...
def run_peak(isa: str, is_int8: bool, rounds: int, pool: Pool) -> float: ...
def make_weight(
    kind: int, parts: Sequence[NDArray[np.uint8]], rows: Sequence[int], k: int, pool: Pool
) -> Weight: ...

class Pool:
    def __init__(self, num_threads: int) -> None: ...
    @property
    def num_threads(self) -> int: ...

class Weight:
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def is_float(self) -> bool: ...
    def row(self, row: int) -> NDArray[np.float32]: ...

class KvPool:
    def __init__(
        self, num_layers: int, num_kv_heads: int, head_dim: int, num_pages: int, is_f16: bool
    ) -> None: ...
    @property
    def num_bytes(self) -> int: ...

class Program:
    def __init__(
        self,
        pool: Pool,
        isa: str,
        kv: KvPool,
        max_tokens: int,
        max_seqs: int,
        max_rows: int,
        vocab: int,
    ) -> None: ...
    def add_buffer(self, width: int, is_rows: bool, /) -> int: ...
    def add_quantized_buffer(self, k: int, is_rows: bool, /) -> int: ...
    def add_rope(
        self, inv_freq: Sequence[float], is_interleaved: bool, factor: float, /
    ) -> int: ...
    def begin_rows(self, is_rows: bool, /) -> None: ...
    def row_op(
        self,
        op: str,
        a: int,
        b: int,
        out: int,
        weight: Weight | None,
        width: int,
        count: int,
        value: float,
        index: int,
    ) -> None: ...
    def begin_linears(self, is_rows: bool, /) -> None: ...
    def linear(self, input: int, out: int, weight: Weight, bias: Weight | None) -> None: ...
    def attend(
        self,
        q: int,
        out: int,
        layer: int,
        num_heads: int,
        scale: float,
        window: int,
        softcap: float,
        /,
    ) -> None: ...
    def finish(self, output: int, width: int, /) -> None: ...
    def run(
        self,
        token_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        cu_seqlens: NDArray[np.int32],
        context_lens: NDArray[np.int32],
        page_table: NDArray[np.int32],
        rows: NDArray[np.int32],
    ) -> NDArray[np.float32]: ...
