"""Slow and obvious answers, in plain Python over single elements: what the drills' functions mean.

They share no code with the solutions, take their arguments on the CPU, and assume these are valid.
"""

from __future__ import annotations

import math

import torch


def slot_mapping(block_table, seq_idx, positions, block_size):
    slots = []
    for sequence, position in zip(seq_idx.tolist(), positions.tolist()):
        block = block_table[sequence][position // block_size].item()
        slots.append(block * block_size + position % block_size)
    return torch.tensor(slots, dtype=torch.int64)


def reshape_and_cache(key, value, k_cache, v_cache, slots):
    block_size = k_cache.shape[1]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            k_cache[slot // block_size, slot % block_size] = key[token]
            v_cache[slot // block_size, slot % block_size] = value[token]


def block_table_to_csr(block_tables, context_lens, page_size):
    indptr, indices, last_page_len = [0], [], []
    for row, length in zip(block_tables.tolist(), context_lens.tolist()):
        pages = math.ceil(length / page_size)
        indices += row[:pages]
        indptr.append(len(indices))
        last_page_len.append(length - page_size * (pages - 1) if pages else 0)
    return tuple(torch.tensor(x, dtype=torch.int32) for x in (indptr, indices, last_page_len))


def csr_to_block_table(indptr, indices, last_page_len, page_size, max_blocks=None):
    starts, pages = indptr.tolist(), indices.tolist()
    rows = [pages[start:end] for start, end in zip(starts, starts[1:])]
    width = max((len(row) for row in rows), default=0) if max_blocks is None else max_blocks
    table = [row + [0] * (width - len(row)) for row in rows]
    lens = [page_size * (len(row) - 1) + last for row, last in zip(rows, last_page_len.tolist())]
    return torch.tensor(table, dtype=torch.int32).view(len(rows), width), torch.tensor(lens, dtype=torch.int32)


def block_table_to_csr_into(block_tables, context_lens, page_size, indptr, indices, last_page_len):
    starts, pages, last = block_table_to_csr(block_tables, context_lens, page_size)
    fits = min(len(pages), len(indices))
    indptr.copy_(starts)
    indices[:fits] = pages[:fits]
    last_page_len.copy_(last)


def attention(q, k_cache, v_cache, block_tables, context_lens, sm_scale=None):
    """(o [B, Hq, D], lse [B, Hq], natural), in float64: a softmax a query head over the tokens, no tile, no split."""
    batch, heads, dim = q.shape
    page_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    scale = 1 / math.sqrt(dim) if sm_scale is None else sm_scale
    o = torch.zeros(batch, heads, dim, dtype=torch.float64)
    lse = torch.full((batch, heads), -math.inf, dtype=torch.float64)
    for b in range(batch):
        where = [(int(block_tables[b, p // page_size]), p % page_size) for p in range(int(context_lens[b]))]
        if not where:
            continue  # no tokens: zeros, and the logarithm of an empty sum
        keys = torch.stack([k_cache[page, offset] for page, offset in where]).double()
        values = torch.stack([v_cache[page, offset] for page, offset in where]).double()
        for h in range(heads):
            kv_head = h // (heads // kv_heads)
            logits = keys[:, kv_head] @ q[b, h].double() * scale
            weights = (logits - logits.max()).exp()
            o[b, h] = weights @ values[:, kv_head] / weights.sum()
            lse[b, h] = logits.max() + weights.sum().log()
    return o, lse


def flashinfer_decode(q, k_cache, v_cache, block_tables, context_lens, return_lse=False):
    o, lse = attention(q, k_cache, v_cache, block_tables, context_lens)
    return (o.to(q.dtype), (lse / math.log(2)).float()) if return_lse else o.to(q.dtype)


def flashinfer_decode_layers(qs, kv_caches, block_tables, context_lens):
    return [flashinfer_decode(q, k, v, block_tables, context_lens) for q, (k, v) in zip(qs, kv_caches)]
