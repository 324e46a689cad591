"""L4's hints, three a stage: a question, an idea, the shape of the line."""

HINTS = (
    (
        "A sequence has 9 tokens in pages of 4, and an item holds 2 pages. How many items does it have, and where "
        "do the last one's tokens begin and end?",
        "Both divisions round up: tokens to pages, and pages to items. Item number i of a sequence begins i chunks "
        "after its token 0, and ends where the next begins or where the sequence does, whichever comes first.",
        "For each sequence: <pages>, then <items>; each item is (<sequence>, <number> * <chunk> * page_size, the "
        "smaller of <one chunk on> and <the length>). row_ptr is 0 and <the running sum of the items>.",
    ),
    (
        "If chunks of 3 pages make too many items, can chunks of 2 make fewer? And which chunk is surely large enough?",
        "The number of items never rises with the chunk, so the answer is where too many becomes few enough. Keep "
        "an interval that holds it, look at its middle, and throw away the half that cannot.",
        "while <low> is below <high>: count the items at <the middle>; if they fit, <high> becomes the middle, "
        "else <low> becomes one more. high begins at <the most pages of any sequence>, so one item each is the end.",
    ),
    (
        "A graph was captured with lists of 5 entries, and the next step has 3 items. What should the other 2 say, and "
        "how long must lists be that fit every step?",
        "There are never more items than the programs allow, unless even one item a sequence is more. Fill up with "
        "items of no tokens, convert to int32 at the end, and check the arguments at the start.",
        "size = max(<sequences>, <items that the programs allow>); each list is <its items> and zeros up to size. "
        'Before all that: assert <what must hold>, "<which argument it is about>".',
    ),
    (
        "Which three numbers does your split kernel of L3 compute for itself that a list can give it? And how does a "
        "program know that it has nothing to do?",
        "Load sequence, start and end of the item, leave if there is no token between them, and run the loop of L2 "
        "from start to end. The column of the table comes from the position in the sequence.",
        "The grid is (<KV heads>, <entries of the list>); for each tile from <start> to <end>, a token is live if its "
        "position is below <end>. What the program found is stored under <the item's number>.",
    ),
    (
        "Sequence 2 was cut into items 3, 4 and 5. How does its merging program learn that, and what does it do if "
        "there are none?",
        "Two neighbours in row_ptr bound the stretch of partial results. Weigh each by the exponential of its lse "
        "less the largest; of nothing the answer is zeros, and its lse minus infinity.",
        "for items from <row_ptr at b> to <row_ptr at b + 1>: raise <the maximum>, shrink <sum and output> to it, add "
        "<the weight> and <the weight times the part>. Divide once at the end, by 1 if <nothing was added>.",
    ),
    (
        "In a replayed graph no Python of yours runs. Which of the things that your function does on the host would "
        "then be those of the first step for ever?",
        "Sizes and addresses may be fixed, lengths and counts may not: leave them to the kernels, which read the list "
        "anew each time. Launch for padding too, and keep nothing from one call to the next.",
        "Grids come from <shapes> only; the number of real items is <read in the kernel>, never on the host. Outputs "
        "and partial results are <new tensors> in every call.",
    ),
    (
        "What do your kernels believe of the work list, of q and of the caches? Which of it could a caller get wrong "
        "without any error?",
        "What L2 refuses, and the list: four int32 tensors, dense, on q's device, three of one length and row_ptr with "
        "an entry more than q has rows. Never a value of theirs: that would wait.",
        'for <each name and tensor>: assert <its shape, dtype, device and density>, f"<the name> must be <what>". The '
        "lengths to compare with are <rows of q> and <entries of seq>.",
    ),
)
