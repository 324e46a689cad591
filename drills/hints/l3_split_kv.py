"""L3's hints, three a stage: a question, an idea, the shape of the line."""

HINTS = (
    (
        "One class of 8 pupils has a mean mark of 1, another of 2 pupils has 0. What is the mean of all ten, and "
        "what must you know of each class beside its mean?",
        "A part's size is the sum of its exponentials, and its lse is the logarithm of that. Weigh each part by the "
        "exponential of its lse minus the row's largest, for large numbers overflow, and divide by the weights' sum.",
        "For each row: top = <the largest lse>, weights = exp(<each lse> - top), o = <sum of weight times part> / <sum "
        "of weights>, and the lse is top + log(<that sum>). A loop over tiles rescales as in L2.",
    ),
    (
        "What are exp(-inf), -inf minus -inf and 0 / 0? Which of them do you meet if one part of a row is empty, and "
        "which if all of them are?",
        "One empty part needs nothing: its weight comes out as 0. Only where the largest lse is -inf must you not "
        "subtract it, and where the weights add up to 0 you must not divide by them. The log of 0 is -inf already.",
        "base = <0 if the largest lse is -inf, else that lse> for all exponentials, and <the weighted sum> / <the "
        "weights' sum, or 1 if it is 0>. A running maximum in a loop needs the same base for what it shrinks.",
    ),
    (
        "Ten tokens and four splits: which tokens does split 2 read, and which split 3? What would 10 // 4 tokens a "
        "split do to the last ones?",
        "A program needs one number more than in L2, its split's. From it and from its own sequence's length come the "
        "first token and the end; L2's loop runs between them, and the mask is the split's end.",
        "chunk = <length / S, rounded up>; start = <split> * chunk; end = <the smaller of start + chunk and the "
        "length>. Store output and lse at <row> * S + <split>, with one order for whoever reads them.",
    ),
    (
        "A sequence has 3 tokens and there are 8 splits. What are start and end of split 5, how often does its loop "
        "run, and what is in its sums then?",
        "A split without tokens still has a place in the buffers, which hold what memory held before. It must store "
        "an output of 0 and an lse of -inf, and the merge does the rest, for a length of 0 as well.",
        "After the loop: <sums of values> / <the total, or 1 where it is 0>, stored whether the loop ran or not; and "
        "<maximum> + <logarithm of the total>, which is -inf by itself.",
    ),
    (
        "If your logits were multiplied by log2(e) for exp2, to which base are the running maximum and the logarithm "
        "of the total?",
        "log2 of a sum times ln 2 is its natural logarithm, and that holds for the maximum as well as for the rest. "
        "If the merge is right, its second result is the lse of the whole, float32 to the end.",
        "A part's lse is <ln 2> * (<maximum> + log2(<total>)). At the end return <o in q's dtype>, or, if it is asked "
        "for, the pair of that and <the merged lse, untouched>.",
    ),
    (
        "Which of L2's assumptions does this kernel share, and what would 0 splits mean?",
        "The same arguments come in as in L2, and the same can be wrong with them: shapes, dtypes, devices, layouts. "
        "num_splits is a plain number on the host, so it may be looked at; lengths and page ids may not.",
        'Above the launch, one line each: assert <num_splits is large enough>, then assert <what must hold>, f"<the '
        "argument> must be <what>, got <what>\", for each of L2's.",
    ),
)
