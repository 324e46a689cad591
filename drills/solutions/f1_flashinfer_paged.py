"""F1 · Block tables to FlashInfer's CSR pages, then plan and run.

A block table is a rectangle, padded on the right. FlashInfer wants the same pages as a compressed sparse row
list (arXiv 2501.01005, section 3.1): sequence b owns indices[indptr[b]:indptr[b+1]], and its last page holds
last_page_len[b] tokens. The example of this file: page_size 4, lengths [9, 2, 5],
block table [[9, 3, 7], [2, ., .], [5, 1, .]] <-> indptr [0, 3, 4, 6], indices [9, 3, 7, 2, 5, 1], last [1, 2, 1].
"""

import functools

import flashinfer
import torch
import triton
import triton.language as tl

CUDA_CORE_GROUPS = (1, 2, 3, 4, 6, 8, 16)  # query heads a KV head that decode without tensor cores is compiled for


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
    B, W = block_tables.shape
    assert page_size >= 1, f"page_size must be at least 1, got {page_size}"
    assert context_lens.shape == (B,), f"context_lens must be [{B}], one a row of block_tables"
    assert (context_lens >= 1).all(), f"context_lens must be at least 1; rows {rows_where(context_lens < 1)} are not"
    pages = (context_lens - 1) // page_size + 1
    assert (pages <= W).all(), f"block_tables has {W} columns, too few for context_lens of rows {rows_where(pages > W)}"
    live = torch.arange(W, device=pages.device) < pages[:, None]
    indices = block_tables[live].int()
    assert (indices >= 0).all(), f"block_tables has negative ids in use: rows {rows_where((block_tables < 0) & live)}"
    indptr = torch.zeros(B + 1, dtype=torch.int32, device=pages.device)
    indptr[1:] = pages.cumsum(0)  # cumsum promotes to int64, the assignment brings it back
    return indptr, indices, (context_lens - (pages - 1) * page_size).int()  # never ctx % page_size: 16 % 16 is 0


def csr_to_block_table(indptr, indices, last_page_len, page_size, max_blocks=None):
    """The way back: (block_tables [B, max_blocks] int32 padded with 0, context_lens [B] int32).

    indptr [B+1], indices [pages], last_page_len [B], int32 or int64. max_blocks defaults to the longest row.
    Vectorised like the way there. Refused (AssertionError naming the argument): a page_size below 1; an indptr
    that does not start at 0, decreases, is not one longer than last_page_len, or does not end at len(indices);
    a last_page_len outside 1..page_size; a sequence with no pages; a max_blocks too small.

    >>> csr_to_block_table([0, 3, 4, 6], [9, 3, 7, 2, 5, 1], [1, 2, 1], page_size=4)  # as tensors
    [[9, 3, 7], [2, 0, 0], [5, 1, 0]], [9, 2, 5]
    """
    B = len(last_page_len)
    assert page_size >= 1, f"page_size must be at least 1, got {page_size}"
    assert indptr.shape == (B + 1,), f"indptr must be [{B + 1}], one longer than last_page_len, got {indptr.shape}"
    assert indptr[0] == 0, "indptr must start at 0"
    assert indptr[-1] == len(indices), f"indptr must end at len(indices) = {len(indices)}"
    pages = indptr.diff()
    assert (pages >= 1).all(), f"indptr must increase: rows {rows_where(pages < 1)} have no pages"
    in_page = (last_page_len >= 1) & (last_page_len <= page_size)
    assert in_page.all(), f"last_page_len must be in 1..{page_size}; rows {rows_where(~in_page)} are not"
    widest = int(pages.max()) if B else 0
    W = widest if max_blocks is None else max_blocks
    assert widest <= W, f"max_blocks is {W} but the longest row has {widest} pages"
    block_tables = torch.zeros(B, W, dtype=torch.int32, device=indptr.device)
    block_tables[torch.arange(W, device=indptr.device) < pages[:, None]] = indices.int()  # row by row, as CSR is
    return block_tables, ((pages - 1) * page_size + last_page_len).int()


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
    return plan(q, k_cache, v_cache, block_tables, context_lens).run(q, (k_cache, v_cache), return_lse=return_lse)


def flashinfer_decode_layers(qs, kv_caches, block_tables, context_lens):
    """One decode step through all layers: the pages are the same in each, so one workspace, one plan, many runs.

    qs: a list of q [B, Hq, D], one a layer; kv_caches: a list of (k_cache, v_cache), as long, all of one shape.
    Returns the list of outputs, o [B, Hq, D] a layer. Refused: what flashinfer_decode refuses, in any layer; lists of
    different lengths; a layer whose shapes or dtypes are not the first one's, which the plan was made for.

    >>> flashinfer_decode_layers([q0, q1, q2], [(k0, v0), (k1, v1), (k2, v2)], block_tables, context_lens)
    [o0, o1, o2]    # 1 construction, 1 plan, 3 runs: a plan costs more than the attention it plans
    """
    assert len(qs) == len(kv_caches), f"qs has {len(qs)} layers but kv_caches {len(kv_caches)}"
    if not qs:
        return []
    for layer, (q, (k_cache, v_cache)) in enumerate(zip(qs, kv_caches)):
        for name, x, first in (("qs", q, qs[0]), ("kv_caches", k_cache, kv_caches[0][0])):
            same = x.shape == first.shape and x.dtype == first.dtype
            assert same, f"{name}[{layer}] is {x.dtype} {list(x.shape)}, but the plan is for {list(first.shape)}"
        check_layouts(q, k_cache, v_cache)
    wrapper = plan(qs[0], *kv_caches[0], block_tables, context_lens)
    return [wrapper.run(q, kv) for q, kv in zip(qs, kv_caches)]


@triton.jit
def block_table_to_csr_kernel(
    tables_ptr, lens_ptr, indptr_ptr, indices_ptr, last_ptr, row_stride, room, page_size,
    B: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program a row: it adds up the pages of the rows before it, then copies its own page ids there."""
    row = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    pages = tl.cdiv(tl.load(lens_ptr + rows, mask=rows < B, other=0), page_size).to(tl.int32)
    start = tl.sum(tl.where(rows < row, pages, 0))
    count = tl.sum(tl.where(rows == row, pages, 0))
    tl.store(indptr_ptr + row, start)
    tl.store(indptr_ptr + B, start + count, mask=row == B - 1)
    last = tl.load(lens_ptr + row) - (count - 1) * page_size
    tl.store(last_ptr + row, tl.where(count > 0, last, 0).to(tl.int32))
    for first in range(0, W, TILE):
        column = first + tl.arange(0, TILE)
        live = (column < count) & (column < W)
        ids = tl.load(tables_ptr + row.to(tl.int64) * row_stride + column, mask=live, other=0)
        tl.store(indices_ptr + start + column, ids.to(tl.int32), mask=live & (start + column < room))


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
    B, W = block_tables.shape
    assert page_size >= 1, f"page_size must be at least 1, got {page_size}"
    assert block_tables.stride(1) == 1 or W == 1, "block_tables must have dense rows"
    for name, x, shape in (
        ("context_lens", context_lens, (B,)), ("indptr", indptr, (B + 1,)),
        ("indices", indices, indices.shape[:1]), ("last_page_len", last_page_len, (B,)),
    ):  # fmt: skip
        assert x.shape == shape and x.is_contiguous(), f"{name} must be {list(shape)} and contiguous"
        assert x.dtype == torch.int32 or name == "context_lens", f"{name} must be int32, got {x.dtype}"
        assert x.device == block_tables.device, f"{name} must be on block_tables' device, {block_tables.device}"
    block_table_to_csr_kernel[(B,)](
        block_tables, context_lens, indptr, indices, last_page_len, block_tables.stride(0), len(indices), page_size,
        B=B, ROWS=triton.next_power_of_2(B), W=W, TILE=min(1024, triton.next_power_of_2(W)),
    )  # fmt: skip


def rows_where(bad):
    """Which rows to name in a refusal."""
    return bad.reshape(len(bad), -1).any(1).nonzero().flatten().tolist()


def check_layouts(q, k_cache, v_cache):
    """FlashInfer reads both caches with one set of strides, and heads as dense rows: it would not notice otherwise."""
    assert q.stride(-1) == 1, "q must be dense in its last dimension: call .contiguous() on it"
    assert k_cache.shape == v_cache.shape and k_cache.dtype == v_cache.dtype, "k_cache and v_cache must agree"
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        assert x.is_contiguous(), f"{name} must be contiguous [NB, page_size, Hkv, D]"


@functools.cache
def workspace(device):
    """FlashInfer's scratch for split-KV, made once a device: it must be zero at its first use."""
    return torch.zeros(128 << 20, dtype=torch.uint8, device=device)


def plan(q, k_cache, v_cache, block_tables, context_lens):
    """A wrapper planned for these pages, after the checks that FlashInfer leaves out."""
    (B, Hq, D), (NB, page_size, Hkv, _) = q.shape, k_cache.shape
    check_layouts(q, k_cache, v_cache)
    assert len(block_tables) == B, f"q has {B} rows but block_tables {len(block_tables)}: one query token a sequence"
    assert q.dtype == k_cache.dtype, f"q is {q.dtype} but k_cache {k_cache.dtype}"
    assert k_cache.shape[3] == D, f"q has head dim {D} but k_cache {k_cache.shape[3]}"
    assert Hq % Hkv == 0, f"q's {Hq} heads are not a multiple of k_cache's {Hkv}"
    csr = block_table_to_csr(block_tables, context_lens, page_size)
    assert (csr[1] < NB).all(), f"block_tables names a page past the pool of {NB}"
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(q.device), "NHD", use_tensor_cores=Hq // Hkv not in CUDA_CORE_GROUPS
    )
    wrapper.plan(*csr, Hq, Hkv, D, page_size, q_data_type=q.dtype, kv_data_type=k_cache.dtype)
    return wrapper
