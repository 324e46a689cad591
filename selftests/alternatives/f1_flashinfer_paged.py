"""F1 written in other ways, all of them right."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from selftests.alternatives import alternative


def counts(block_tables, context_lens, page_size):
    """Pages of each sequence, after the checks, as other exceptions."""
    if page_size < 1:
        raise ValueError("page_size")
    if block_tables.shape[0] != context_lens.shape[0]:
        raise ValueError("context_lens")
    if context_lens.numel() and context_lens.min().item() < 1:
        raise ValueError("context_lens")
    pages = (context_lens + (page_size - 1)) // page_size
    if pages.numel() and pages.max().item() > block_tables.shape[1]:
        raise IndexError("block_tables")
    return pages


def finish(indptr, indices, last):
    if (indices < 0).any():
        raise ValueError("block_tables")
    return indptr.to(torch.int32), indices.to(torch.int32), last.to(torch.int32)


@alternative
def masked_select():
    """masked_select for the pages, a padded cumsum for indptr, a remainder moved by one for the last page."""

    def block_table_to_csr(block_tables, context_lens, page_size):
        pages = counts(block_tables, context_lens, page_size)
        column = torch.arange(block_tables.size(1), device=pages.device).expand_as(block_tables)
        indices = torch.masked_select(block_tables, column < pages.unsqueeze(1))
        indptr = torch.nn.functional.pad(torch.cumsum(pages, 0), (1, 0))
        return finish(indptr, indices, (context_lens - 1) % page_size + 1)

    return block_table_to_csr


@alternative
def repeat_rows():
    """Every page's row by repeat_interleave, its column by the distance from the row's start, one flat gather."""

    def block_table_to_csr(block_tables, context_lens, page_size):
        pages = counts(block_tables, context_lens, page_size).long()
        ends = pages.cumsum(0)
        row = torch.arange(len(pages), device=pages.device).repeat_interleave(pages)
        column = torch.arange(len(row), device=pages.device) - (ends - pages)[row]
        indices = block_tables.reshape(-1).take(row * block_tables.shape[1] + column)
        indptr = torch.cat([ends.new_zeros(1), ends])
        return finish(indptr, indices, context_lens - page_size * (pages - 1))

    return block_table_to_csr


@alternative
def nonzero_places():
    """The live places by nonzero, the table indexed with them; the last page from what rounding up adds."""

    def block_table_to_csr(block_tables, context_lens, page_size):
        pages = counts(block_tables, context_lens, page_size)
        live = torch.arange(block_tables.shape[1], device=pages.device)[None] * page_size < context_lens[:, None]
        rows, columns = live.nonzero(as_tuple=True)
        indptr = torch.searchsorted(rows, torch.arange(len(pages) + 1, device=pages.device))
        return finish(indptr, block_tables[rows, columns], page_size - (pages * page_size - context_lens))

    return block_table_to_csr


@alternative
def gather_and_mask():
    """The way back by a gather of every cell, clamped, and a mask; checks in one go at the end."""

    def csr_to_block_table(indptr, indices, last_page_len, page_size, max_blocks=None):
        if page_size < 1 or len(indptr) != len(last_page_len) + 1:
            raise ValueError("page_size or indptr")
        start, pages = indptr[:-1].long(), indptr[1:].long() - indptr[:-1].long()
        bad = int(indptr[0]) != 0 or int(indptr[-1]) != indices.numel() or bool((pages < 1).any())
        if bad or bool(((last_page_len < 1) | (last_page_len > page_size)).any()):
            raise ValueError("indptr or last_page_len")
        longest = int(pages.max()) if len(pages) else 0
        width = longest if max_blocks is None else max_blocks
        if width < longest:
            raise ValueError("max_blocks")
        column = torch.arange(width, device=indptr.device)
        source = torch.nn.functional.pad(indices.long(), (0, 1))
        cell = (start[:, None] + column).clamp(max=indices.numel())
        table = torch.where(column < pages[:, None], source[cell], 0)
        return table.int(), (pages * page_size - page_size + last_page_len).int()

    return csr_to_block_table


@alternative
def scatter_rows():
    """The way back by scatter: each page knows its row and its column."""

    def csr_to_block_table(indptr, indices, last_page_len, page_size, max_blocks=None):
        assert page_size > 0
        assert indptr.numel() == last_page_len.numel() + 1
        pages = torch.diff(indptr.long())
        assert indptr[0].item() == 0
        assert torch.all(pages > 0)
        assert indptr[-1].item() == indices.shape[0]
        assert torch.all((last_page_len > 0) & (last_page_len <= page_size))
        width = max([*pages.amax(0, keepdim=True).tolist()] if len(pages) else [0])
        if max_blocks is not None:
            assert max_blocks >= width
            width = max_blocks
        row = torch.repeat_interleave(torch.arange(len(pages), device=pages.device), pages)
        column = torch.arange(len(indices), device=pages.device) - indptr.long()[row]
        table = torch.zeros(len(pages) * width, dtype=torch.int32, device=pages.device)
        table.scatter_(0, row * width + column, indices.int())
        return table.view(len(pages), width), ((pages - 1) * page_size + last_page_len).to(torch.int32)

    return csr_to_block_table


def planned(q, k_cache, v_cache, block_tables, context_lens, wrapper):
    """Checked and planned, every argument of plan by keyword and in another order."""
    B, heads, dim = q.shape
    pool, page_size, kv_heads, cache_dim = k_cache.shape
    if k_cache.shape != v_cache.shape or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("caches")
    if len({q.dtype, k_cache.dtype, v_cache.dtype}) > 1:
        raise TypeError("dtypes")
    if dim != cache_dim or heads % kv_heads or block_tables.shape[0] != B or q.stride(2) != 1:
        raise ValueError("q")
    pages = counts(block_tables, context_lens, page_size)
    live = torch.arange(block_tables.shape[1], device=q.device) < pages[:, None]
    indices = block_tables[live]
    if ((indices < 0) | (indices >= pool)).any():
        raise IndexError("block_tables")
    indptr = torch.nn.functional.pad(pages.cumsum(0), (1, 0))
    indptr, indices, last = finish(indptr, indices, (context_lens - 1) % page_size + 1)
    wrapper.plan(
        kv_data_type=k_cache.dtype, q_data_type=q.dtype, page_size=page_size, head_dim=dim, num_kv_heads=kv_heads,
        num_qo_heads=heads, last_page_len=last, indices=indices, indptr=indptr,
    )  # fmt: skip
    return wrapper


@alternative
def always_tensor_cores():
    """Imported by name, tensor cores for every group, a larger workspace of its own each time, keyword arguments."""

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper as Wrapper

        workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=q.device)
        wrapper = Wrapper(float_workspace_buffer=workspace, use_tensor_cores=True, kv_layout="NHD")
        planned(q, k_cache, v_cache, block_tables, context_lens, wrapper)
        return wrapper.run(return_lse=return_lse, paged_kv_cache=(k_cache, v_cache), q=q)

    return flashinfer_decode


@alternative
def one_cache_tensor():
    """Both caches as one 5-D tensor, an own output and lse, run_return_lse, the dtypes as strings."""

    def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
        import flashinfer.decode as fi

        group = q.shape[1] // k_cache.shape[2]
        wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(16 << 20, dtype=torch.int32, device=q.device), use_tensor_cores=group not in (1, 2, 4, 8)
        )
        planned(q, k_cache, v_cache, block_tables, context_lens, wrapper)
        both = torch.stack([k_cache, v_cache], dim=1)
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        wrapper.run_return_lse(q.contiguous(), both, out=out, lse=lse)
        return (out, lse) if return_lse else out

    return flashinfer_decode


@alternative
def a_wrapper_kept():
    """One wrapper kept from step to step, planned anew in each; results in buffers of their own."""
    kept: dict[str, Any] = {}

    def flashinfer_decode_layers(qs, kv_caches, block_tables, context_lens):
        import flashinfer

        if len(qs) != len(kv_caches):
            raise ValueError("qs and kv_caches")
        for q, (k, v) in zip(qs, kv_caches):
            if (
                q.shape != qs[0].shape
                or k.shape != kv_caches[0][0].shape
                or k.shape != v.shape
                or q.dtype != qs[0].dtype
            ):
                raise ValueError("layers differ")
        if not kept:
            workspace = torch.zeros(64 << 20, dtype=torch.uint8, device=qs[0].device)
            kept["wrapper"] = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper = planned(qs[0], kv_caches[0][0], kv_caches[0][1], block_tables, context_lens, kept["wrapper"])
        outs = torch.empty(len(qs), *qs[0].shape, dtype=qs[0].dtype, device=qs[0].device)
        for q, kv, out in zip(qs, kv_caches, outs):
            wrapper.run(q, tuple(kv), out=out)
        return tuple(outs)

    return flashinfer_decode_layers


def check_buffers(block_tables, context_lens, page_size, indptr, indices, last_page_len):
    B = block_tables.shape[0]
    if page_size < 1 or context_lens.numel() != B or indptr.numel() != B + 1 or last_page_len.numel() != B:
        raise ValueError("sizes")
    if not indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32:
        raise TypeError("dtypes")


@alternative
def one_program():
    """A single program: a running sum inside the kernel, rows one after another."""

    @triton.jit
    def block_table_to_csr_kernel(
        table, lens, indptr, indices, last, stride, room, page,
        B: tl.constexpr, P: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    ):  # fmt: skip
        rows = tl.arange(0, P)
        n = tl.load(lens + rows, mask=rows < B, other=0).to(tl.int64)
        pages = (n + page - 1) // page
        ends = tl.cumsum(pages, 0)
        tl.store(indptr + rows, (ends - pages).to(tl.int32), mask=rows < B)
        tl.store(indptr + rows + 1, ends.to(tl.int32), mask=rows == B - 1)
        tl.store(last + rows, tl.where(pages > 0, n - (pages - 1) * page, 0).to(tl.int32), mask=rows < B)
        columns = tl.arange(0, C)
        for b in range(0, B):
            start = tl.sum(tl.where(rows == b, ends - pages, 0))
            count = tl.sum(tl.where(rows == b, pages, 0))
            live = (columns < count) & (columns < W) & (start + columns < room)
            ids = tl.load(table + b * stride + columns, mask=live, other=0)
            tl.store(indices + start + columns, ids.to(tl.int32), mask=live)

    def block_table_to_csr_into(block_tables, context_lens, page_size, indptr, indices, last_page_len):
        check_buffers(block_tables, context_lens, page_size, indptr, indices, last_page_len)
        B, W = block_tables.shape
        block_table_to_csr_kernel[(1,)](
            block_tables, context_lens, indptr, indices, last_page_len, block_tables.stride(0), indices.numel(),
            page_size, B=B, P=triton.next_power_of_2(B), W=W, C=triton.next_power_of_2(W),
        )  # fmt: skip

    return block_table_to_csr_into


@alternative
def a_grid_of_tiles():
    """A 2-D grid, rows by tiles of 64 columns; rows before are counted 32 at a time."""

    @triton.jit
    def block_table_to_csr_kernel(
        table, lens, indptr, indices, last, stride, room, page: tl.constexpr, B: tl.constexpr, W: tl.constexpr
    ):
        b, tile = tl.program_id(0), tl.program_id(1)
        start = tl.program_id(0) * 0
        for first in range(0, B, 32):
            rows = first + tl.arange(0, 32)
            n = tl.load(lens + rows, mask=rows < b, other=0)
            start += tl.sum((n + page - 1) // page).to(tl.int32)
        length = tl.load(lens + b)
        count = (length + page - 1) // page
        if tile == 0:
            tl.store(indptr + b, start)
            tl.store(last + b, tl.where(length > 0, (length - 1) % page + 1, 0).to(tl.int32))
            if b == B - 1:
                tl.store(indptr + B, (start + count).to(tl.int32))
        column = tile * 64 + tl.arange(0, 64)
        live = (column < count) & (column < W) & (start + column < room)
        ids = tl.load(table + b.to(tl.int64) * stride + column, mask=live, other=0)
        tl.store(indices + start + column, ids, mask=live)

    def block_table_to_csr_into(block_tables, context_lens, page_size, indptr, indices, last_page_len):
        check_buffers(block_tables, context_lens, page_size, indptr, indices, last_page_len)
        B, W = block_tables.shape
        block_table_to_csr_kernel[B, triton.cdiv(W, 64)](
            block_tables, context_lens, indptr, indices, last_page_len, block_tables.stride(0), indices.shape[0],
            page=page_size, B=B, W=W,
        )  # fmt: skip

    return block_table_to_csr_into
