"""F1 · Block tables to FlashInfer's CSR pages, then plan and run.

A block table is a rectangle, padded on the right. FlashInfer wants the same pages as a compressed sparse row
list (arXiv 2501.01005, section 3.1): sequence b owns indices[indptr[b]:indptr[b+1]], and its last page holds
last_page_len[b] tokens. The example of this file: page_size 4, lengths [9, 2, 5],
block table [[9, 3, 7], [2, ., .], [5, 1, .]] <-> indptr [0, 3, 4, 6], indices [9, 3, 7, 2, 5, 1], last [1, 2, 1].
"""

# Run: pytest drills/tests/test_f1_flashinfer_paged.py   or: drills test f1

import flashinfer
import torch
import triton
import triton.language as tl


def block_table_to_csr(block_tables, context_lens, page_size):
    """The pages of a batch as FlashInfer takes them.

    block_tables [B, W] int32 or int64: page ids; entries past the live part of a row hold anything (-1, 2^30).
    context_lens [B] int32 or int64: tokens in each sequence. page_size: tokens a page.
    Returns (indptr [B+1], indices [pages], last_page_len [B]), all int32 and contiguous, on the inputs' device.
    The number of torch operations does not depend on B; B = 0 is fine.
    Refused (AssertionError naming the argument): a page_size below 1; a length below 1; a row narrower than its
    length needs; a negative page id in the live part.

    >>> block_table_to_csr([[9, 3, 7], [2, -1, -1], [5, 1, -1]], context_lens=[9, 2, 5], page_size=4)  # as tensors
    [0, 3, 4, 6], [9, 3, 7, 2, 5, 1], [1, 2, 1]     # 9 tokens = 2 full pages and 1 token in a third
    """
    raise NotImplementedError("F1 block_table_to_csr is yours to write")


def csr_to_block_table(indptr, indices, last_page_len, page_size, max_blocks=None):
    """The way back: (block_tables [B, max_blocks] int32 padded with 0, context_lens [B] int32).

    indptr [B+1], indices [pages], last_page_len [B], int32 or int64. max_blocks defaults to the longest row.
    Vectorised like the way there. Refused (AssertionError naming the argument): a page_size below 1; an indptr
    that does not start at 0, decreases, is not one longer than last_page_len, or does not end at len(indices);
    a last_page_len outside 1..page_size; a sequence with no pages; a max_blocks too small.

    >>> csr_to_block_table([0, 3, 4, 6], [9, 3, 7, 2, 5, 1], [1, 2, 1], page_size=4)  # as tensors
    [[9, 3, 7], [2, 0, 0], [5, 1, 0]], [9, 2, 5]
    """
    raise NotImplementedError("F1 csr_to_block_table is yours to write")


def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
    """One decode step of paged attention: convert, plan, run.

    q [B, Hq, D] fp16 or bf16; k_cache, v_cache [NB, page_size, Hkv, D] contiguous, of q's dtype; block_tables [B, W]
    and context_lens [B] as for block_table_to_csr. Query head h reads KV head h // (Hq // Hkv); scale 1/sqrt(D).
    Returns o [B, Hq, D] of q's dtype, and with return_lse also lse [B, Hq] fp32: FlashInfer's, the log to base 2.
    Refused: what block_table_to_csr refuses; q with another number of rows than block_tables; dtypes or head dims
    that disagree; a cache not contiguous or the two of different shapes; Hq not a multiple of Hkv; a page id past
    the pool. FlashInfer itself takes most of these silently. A group of 5, 7, 9.. heads needs use_tensor_cores.

    >>> o, lse = flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=True)
    # one token whose logit q·k/sqrt(D) is s: o is its v, lse = s · log2(e): s = 2 -> 2.885, not 2
    """
    raise NotImplementedError("F1 flashinfer_decode is yours to write")


def flashinfer_decode_layers(qs, kv_caches, block_tables, context_lens):
    """One decode step through all layers: the pages are the same in each, so one workspace, one plan, many runs.

    qs: a list of q [B, Hq, D], one a layer; kv_caches: a list of (k_cache, v_cache), as long, all of one shape.
    Returns the list of outputs, o [B, Hq, D] a layer. Refused: what flashinfer_decode refuses, in any layer; lists of
    different lengths; a layer whose shapes or dtypes are not the first one's, which the plan was made for.

    >>> flashinfer_decode_layers([q0, q1, q2], [(k0, v0), (k1, v1), (k2, v2)], block_tables, context_lens)
    [o0, o1, o2]    # 1 construction, 1 plan, 3 runs: a plan costs more than the attention it plans
    """
    raise NotImplementedError("F1 flashinfer_decode_layers is yours to write")


@triton.jit
def block_table_to_csr_kernel(
    tables_ptr, lens_ptr, indptr_ptr, indices_ptr, last_ptr, row_stride, room, page_size,
    B: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program a row: it adds up the pages of the rows before it, then copies its own page ids there."""
    raise NotImplementedError("F1 block_table_to_csr_kernel is yours to write")


def block_table_to_csr_into(block_tables, context_lens, page_size, indptr, indices, last_page_len):
    """block_table_to_csr for a CUDA graph: one launch into fixed buffers, and no value is read on the host.

    block_tables [B, W], int32 or int64, dense rows; context_lens [B] int32 or int64, contiguous. Written in place, all
    int32 and contiguous: indptr [B+1], indices [any size], last_page_len [B]. Entries of indices past indptr[B] stay.
    No value can be refused here, so: a row of length 0 (padding of a captured batch) gets no pages and a last_page_len
    of 0; nothing is written past the end of indices, while indptr still tells how many entries were needed. The caller
    promises that each row is wide enough. Refused (AssertionError): wrong shapes, dtypes, devices, strides.

    >>> block_table_to_csr_into([[9, 3, 7], [0, 0, 0], [5, 1, 0]], [9, 0, 5], 4, indptr, indices, last_page_len)
    # indptr = [0, 3, 3, 5], indices = [9, 3, 7, 5, 1, ...], last_page_len = [1, 0, 1]
    """
    raise NotImplementedError("F1 block_table_to_csr_into is yours to write")
