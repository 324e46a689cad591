"""F1's mistakes: pages that are not the sequence's, and what FlashInfer takes without a word."""

from __future__ import annotations

import torch

from drills.mistakes import mistake


@mistake("csr", fails=["test_last_page"], seen=["flashinfer#2896"])
def last_page_by_remainder():
    """ctx % page_size is 0 where the last page is full: use ctx - (pages - 1) · page_size, or (ctx - 1) % page_size + 1."""

    def block_table_to_csr(block_tables, context_lens, page_size):
        pages = (context_lens - 1) // page_size + 1
        live = torch.arange(block_tables.shape[1], device=pages.device) < pages[:, None]
        indptr = torch.zeros(len(pages) + 1, dtype=torch.int32, device=pages.device)
        indptr[1:] = pages.cumsum(0)
        return indptr, block_tables[live].int(), (context_lens % page_size).int()

    return block_table_to_csr
