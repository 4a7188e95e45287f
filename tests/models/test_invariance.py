"""Promise 1 on the reference backend: a sequence's logits, bit for bit, however it is run."""

from __future__ import annotations

import numpy as np
import pytest
import running
import tiny_models
from numpy.typing import NDArray

from headrace.backends.ops import Limits, StepArrays
from headrace.backends.reference import ReferenceOps
from headrace.models import load_model

LIMITS = Limits(max_tokens=64, max_seqs=2, max_rows=64, max_context=128)


def span(tokens: NDArray[np.int32], begin: int, end: int, first_page: int) -> StepArrays:
    """Positions begin to end - 1 of one sequence, all rows wanted."""
    step = running.whole_step(tokens[:end], list(range(end - begin)))
    pages = step.page_table + np.int32(first_page)
    cu_seqlens = np.array([0, end - begin], np.int32)
    return StepArrays(
        tokens[begin:end], step.positions[begin:], cu_seqlens, step.context_lens, pages, step.rows
    )


def beside(a: StepArrays, b: StepArrays) -> StepArrays:
    """Two sequences in one step."""
    width = max(a.page_table.shape[1], b.page_table.shape[1])
    tables = [np.pad(x.page_table, ((0, 0), (0, width - x.page_table.shape[1]))) for x in (a, b)]
    n = len(a.token_ids)
    return StepArrays(
        np.concatenate([a.token_ids, b.token_ids]),
        np.concatenate([a.positions, b.positions]),
        np.concatenate([a.cu_seqlens, b.cu_seqlens[1:] + np.int32(n)]),
        np.concatenate([a.context_lens, b.context_lens]),
        np.concatenate(tables),
        np.concatenate([a.rows, b.rows + np.int32(n)]),
    )


@pytest.mark.parametrize("case", ["llama3", "gemma2", "gemma3", "smollm3", "qwen2", "phi3"])
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunks_and_batch_mates_change_no_bit(case: str, chunk: int) -> None:
    ops = ReferenceOps()
    model = load_model(tiny_models.hf_checkpoint(case), ops)
    tokens, mate = tiny_models.prompts(case)[0], tiny_models.prompts(case)[0][::-1].copy()
    alone = ops.compile(model.forward, ops.kv_pool(model.kv_spec(8)), LIMITS)
    expected = alone(span(tokens, 0, len(tokens), 0))

    mixed = ops.compile(model.forward, ops.kv_pool(model.kv_spec(8)), LIMITS)
    got = []
    for begin in range(0, len(tokens), chunk):
        end = min(begin + chunk, len(tokens))
        step = beside(span(mate, begin, end, 5), span(tokens, begin, end, 1))
        got.append(mixed(step)[end - begin :])
    assert np.array_equal(np.concatenate(got), expected)
