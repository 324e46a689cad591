"""The hints: for each stage of a drill a question, an idea, and the shape of the line. A shape is never the code.

HINTS["L1"][0]                  # the three hints of L1's first stage
next_hint("L1", 1, given=0)     # (1, "A token is at position 9 of its sequence …"), and None after the third
"""

from __future__ import annotations

import json
from pathlib import Path

from drills import catalog

HINTS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "L1": (
        (
            "A token is at position 9 of its sequence, and blocks hold 4. Which of the sequence's blocks is it "
            "in, counted from 0, and how far into that block?",
            "The quotient picks a column of the sequence's own row in the block table, and the block id found "
            "there says where in the pool the block begins. The remainder is the way from there.",
            "The slot is <block> * block_size + <offset>: the block is looked up with seq_idx[t] and "
            "positions[t], the offset comes from positions[t] alone.",
        ),
        (
            "What would have to change if T were 100,000 and every Python line ran once? And which dtype does an "
            "int32 block id times a block size have?",
            "Indexing takes tensors for rows and for columns, and gives one value for each pair. Look at the "
            "whole of the arguments first, since a wrong index may find something, and widen before you multiply.",
            "Checks of the form assert (<condition on a whole tensor>).all(), then table[<rows>, <columns>] "
            "widened to int64, then the same formula as for one token.",
        ),
        (
            "If the cache is a matrix with one row a slot, how long is a row, and at which value does row 13 begin?",
            "One program copies one token: it knows its number, loads its slot, and needs a vector of columns. "
            "The source row is found with the token's number, the target row with the slot.",
            "Load from <source> + token * <its row stride> + <columns>, store to <cache> + slot * <width> + "
            "<columns>, for K and for V. The grid is one program a slot.",
        ),
        (
            "A tile must be a power of two and a row is 6 values wide: what do the other two lanes do? And what "
            "should all eight do if the slot is -1?",
            "Both are one mask: think of padding as a row of width 0, and keep the lanes whose column is within "
            "the width. The number of programs comes from slots, for key may have more rows.",
            "The stores' mask is <columns> < <the row's width if the slot is live, else 0>. The loads need <columns> < "
            "<the row's width> at least, with other=0.",
        ),
        (
            "Where does row 1 of qkv[:, 1] begin, in values after row 0? And what is 2 * 1,200,000,000 in int32?",
            "The host knows each tensor's row stride and can pass it on, key's and value's own. The number of a "
            "program is an int32 until you widen it, and a copy may see any dtype as integers of its size.",
            "token = <program number> widened to int64, before any product. The kernel is given <key's stride of "
            "dimension 0> and <value's>, and if a dtype makes trouble, tensors seen as integers of as many bytes.",
        ),
        (
            "What does your kernel assume about its five arguments and never look at? Which of these would make it "
            "write somewhere else?",
            "For each assumption one check before the launch: shapes, dtypes, devices, contiguous caches, dense "
            "rows, enough rows, int64 slots. Never a slot's value, which would wait for the GPU.",
            'Above the launch, one line each: assert <what must hold>, f"<the argument> must be <what>, got '
            '<what>". For density, ask a single row whether it is contiguous.',
        ),
    ),
    "F1": (
        (
            "How many pages do 9 tokens need if a page holds 4? And 8 tokens? How many tokens are in the last "
            "page of each?",
            "Round the division up for the page counts; a running sum of them says where each sequence begins. "
            "The last page holds what is left once all pages before it are full, so never 0.",
            "indptr is 0 followed by <the running sum of the page counts>; indices is <the table where its column "
            "number is below the row's count>; last_page_len is <length> - <full pages before the last> * "
            "page_size.",
        ),
        (
            "Which dtype does a running sum have? And what does a mask do with a row that has fewer columns than "
            "its length needs?",
            "Convert each result to int32 at the end. Before that, refuse what the mask would hide: lengths below "
            "1, rows that are too narrow, negative ids where the mask is true, one length too many.",
            "assert (<page counts> <= <columns>).all(), naming the rows that are not, and the like for the rest. "
            "Only entries that the mask keeps are looked at.",
        ),
        (
            "How many pages does each sequence have, if all you know is where each begins and where the last one ends?",
            "The differences of indptr are the page counts, and the same mask as on the way there marks the "
            "places to fill: row by row is the order that indices has. Check the lists against each other first.",
            "A table of zeros, then table[<mask of the live part>] = <the ids>. The length is (<pages> - 1) * "
            "page_size + <tokens in the last page>.",
        ),
        (
            "What does plan need to know, and what does it assume if you do not say it? When does a plan stop "
            "being right?",
            "Convert, make a wrapper over a workspace that is made only once, plan in every call, run. Say which "
            "layout [NB, page_size, Hkv, D] is, which dtypes there are, and whether this group of heads needs "
            "tensor cores.",
            "wrapper.plan(<three lists>, <heads>, <KV heads>, <head dim>, <page size>, <both dtypes by keyword>), "
            "then wrapper.run(<q>, <both caches>, <whether the lse is wanted>), its result returned as it comes.",
        ),
        (
            "FlashInfer's kernel gets addresses and a plan. Which wrong q, cache or page id could it still notice?",
            "Hardly any. Compare q with the table (rows) and with the cache (dtype, head dim, a whole number of "
            "heads a KV head), the caches with each other, and the page ids with the size of the pool, all before "
            "planning.",
            "assert <q's rows> == <the table's rows>, and one such line for each row of the page's table. The "
            "pool's check is (<indices> < <pages in the pool>).all().",
        ),
        (
            "What is the same in all layers of a step, and what differs? What was the plan made for?",
            "The pages are the same: plan once with the first layer, run every layer with its own q and caches. "
            "Before that, compare each layer's shapes and dtypes with the first one's, for the wrapper will not.",
            "for <each layer>: assert <same shape and dtype as layer 0>; then one <plan>, and wrapper.run(<q>, "
            "<caches>) for each layer. Between calls keep the workspace, never a plan.",
        ),
        (
            "A program handles row 2. How can it learn where its pages begin, without asking the programs of rows "
            "0 and 1?",
            "It loads all lengths, makes page counts of them, and adds up those of the rows before its own. Then "
            "it copies its live columns, tile by tile; an empty row copies nothing and has 0 in its last page.",
            "start = sum over <page counts where the row number is below mine>; for each tile, store <the ids> at "
            "indices + start + <columns>, where <the column is live> and start + <column> is below <the room "
            "there is>.",
        ),
    ),
}


def next_hint(drill: str, stage: int, given: int) -> tuple[int, str] | None:
    """The hint after the first `given` ones, with its level (1 to 3). Stages count from 1. None: all were given."""
    hints = HINTS[drill][stage - 1]
    return (given + 1, hints[given]) if given < len(hints) else None


def give(drill: catalog.Drill, stage: int, store: Path) -> tuple[int, str]:
    """The next hint for a stage, after those that `store` (a JSON file) remembers; after the third, the third again."""
    given = _given(store)
    key = f"{drill.id} stage {stage}"
    answer = next_hint(drill.id, stage, given.get(key, 0)) or (3, HINTS[drill.id][stage - 1][2])
    store.write_text(json.dumps(given | {key: answer[0]}, indent=1), encoding="utf-8")
    return answer


def had(drill: catalog.Drill, stage: int, store: Path) -> list[tuple[int, str]]:
    """The hints of a stage that were given so far, by level."""
    return list(enumerate(HINTS[drill.id][stage - 1][: _given(store).get(f"{drill.id} stage {stage}", 0)], 1))


def _given(store: Path) -> dict[str, int]:
    try:
        return json.loads(store.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
