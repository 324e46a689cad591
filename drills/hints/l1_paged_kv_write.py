"""L1's hints, three a stage: a question, an idea, the shape of the line."""

HINTS = (
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
)
