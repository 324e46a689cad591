"""L2's hints, three a stage: a question, an idea, the shape of the line."""

HINTS = (
    (
        "Three tokens have the logits 1, 5 and 3, and you see them one after another. What can you keep so that "
        "you never need the first one again, and never take exp of more than 0?",
        "Keep three things: the largest logit so far, the sum of exp(logit - largest), and the same sum with each"
        " V as a factor. When the largest logit rises, both sums shrink by exp(old - new). Divide once, at the "
        "end.",
        "Per tile: new = max(<old largest>, <the tile's>); factor = exp(<old> - <new>); each sum becomes <sum> * "
        "factor + <the tile's part>. Before that, -inf for the logit of every position that is no token.",
    ),
    (
        "Pages hold 4 tokens and a tile holds 16. Which pages do positions 16 to 31 lie in, and who knows their ids?",
        "A tile is a vector of positions, and each one looks up its own page: the quotient picks the column of "
        "the sequence's row, the remainder the place in the page. The loop ends at the sequence's own length.",
        "pages = load(<table> + <sequence> * <its row stride> + <quotients>), a vector; a token's place in the "
        "cache is (<page> * page size + <remainder>) rows of Hkv * D values from the beginning.",
    ),
    (
        "With 6 query heads and 2 KV heads, which query heads read KV head 1? How often should its K be loaded?",
        "Give a program one KV head and all query heads of its group: q is then a matrix with a row a query head,"
        " and K and V are loaded once for all. tl.dot needs 16 rows or more, so some rows are nobody's.",
        "heads = <KV head> * <group size> + <row numbers up to a power of two>; rows from the group size on are "
        "masked both where q is loaded and where o is stored.",
    ),
    (
        "What is 0 * NaN? And what is 0 / 0, for a sequence that has no tokens at all?",
        "A weight of 0 does not protect you from the V beside it. So neither load what is dead nor look up its "
        "page, and divide by something that is not 0 where there was nothing to add up.",
        "Every load from the table, from K and from V has mask=<position below length> and other=0; the last "
        "division is by tl.where(<there was a token>, <sum of weights>, 1).",
    ),
    (
        "Which number says how far row 1 of q is from row 0 if q was cut out of a fused QKV tensor? And when is "
        "`sm_scale or default` not what you mean?",
        "The host passes on the row strides of q and of the table, and the scale. The width of a tile is a power "
        "of two, so a D of 80 needs a mask; sums and logits are float32 whatever q is; page ids become int64 "
        "before a product.",
        "scale = <the default if sm_scale is None, else sm_scale>, times log2(e) if you take exp2. Columns from D"
        " on are masked in <each load and store>; tl.dot gets <the precision of the inputs>.",
    ),
    (
        "What does your kernel assume about its five tensors and never look at? Which of these would give a wrong"
        " answer instead of an error?",
        "For each assumption one check before the launch: shapes that fit, one dtype, int32 tables and lengths, "
        "whole groups, contiguous caches, dense rows. Never a value of a tensor, which would wait for the GPU.",
        'Above the launch, one line each: assert <what must hold>, f"<the argument> must be <what>, got <what>". '
        "Compare <each cache> with q, and <each count of rows> with B.",
    ),
)
