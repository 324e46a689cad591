"""F1's hints, three a stage: a question, an idea, the shape of the line."""

HINTS = (
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
        "What does plan need to know, and what does it assume if you do not say it? When does a plan stop being right?",
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
        "A program handles row 2. How can it learn where its pages begin, without asking the programs of rows 0 and 1?",
        "It loads all lengths, makes page counts of them, and adds up those of the rows before its own. Then "
        "it copies its live columns, tile by tile; an empty row copies nothing and has 0 in its last page.",
        "start = sum over <page counts where the row number is below mine>; for each tile, store <the ids> at "
        "indices + start + <columns>, where <the column is live> and start + <column> is below <the room "
        "there is>.",
    ),
)
