"""The drills: the one place that lists them. README's table, the command line and the stubs' check read this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Function:
    """One function a learner writes: its arguments in order, and which of them it changes in place."""

    name: str
    arguments: tuple[str, ...]
    returns: tuple[str, ...] = ()  # what the parts of its result are called
    writes: tuple[str, ...] = ()
    kernel: str | None = None  # the Triton kernel that must do the work
    # How a place in a part of the result is called: {0} is its first index, {name} an argument's entry at that index.
    places: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def signature(self) -> str:
        return f"{self.name}({', '.join(self.arguments)})"


@dataclass(frozen=True)
class Stage:
    """One step of a drill, in the order a learner would write it. `section` is an anchor of the drill's page."""

    title: str
    section: str
    function: str


@dataclass(frozen=True)
class Drill:
    id: str
    title: str
    module: str
    functions: tuple[Function, ...]
    stages: tuple[Stage, ...]
    needs: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        return f"{self.module}.py"

    @property
    def tests(self) -> Path:
        return PACKAGE / "tests" / f"test_{self.module}.py"

    @property
    def page(self) -> str:
        """The page that teaches it, as it is named to a learner: relative to drills/."""
        return f"content/{self.id.lower()}.md"

    def section(self, stage: int) -> str:
        return f"drills/{self.page}#{self.stages[stage - 1].section}"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


HEADS = {"o": "sequence {0}, query head {1}, dim {2}", "lse": "sequence {0}, query head {1}"}

L1 = Drill(
    "L1",
    "Write K and V into the paged cache",
    "l1_paged_kv_write",
    functions=(
        Function(
            "slot_mapping",
            _words("block_table seq_idx positions block_size"),
            returns=("slots",),
            places={"slots": "token {0} (sequence {seq_idx}, position {positions})"},
        ),
        Function(
            "reshape_and_cache",
            _words("key value k_cache v_cache slots"),
            writes=("k_cache", "v_cache"),
            kernel="reshape_and_cache_kernel",
        ),
    ),
    stages=(
        Stage("the slot of a token", "slot-mapping", "slot_mapping"),
        Stage("a whole batch of slots", "batch", "slot_mapping"),
        Stage("writing rows", "writing-rows", "reshape_and_cache"),
        Stage("padding and odd widths", "masks", "reshape_and_cache"),
        Stage("strides, dtypes and big offsets", "addresses", "reshape_and_cache"),
        Stage("refusing what would corrupt", "host-checks", "reshape_and_cache"),
    ),
)

L2 = Drill(
    "L2",
    "Decode over the block table: online softmax, grouped heads",
    "l2_paged_decode",
    needs=("L1",),
    functions=(
        Function(
            "paged_decode",
            _words("q k_cache v_cache block_tables context_lens sm_scale"),
            returns=("o",),
            kernel="paged_decode_kernel",
            places=HEADS,
        ),
    ),
    stages=(
        Stage("attention within one page", "online-softmax", "paged_decode"),
        Stage("the pages of a sequence", "pages", "paged_decode"),
        Stage("query heads that share K and V", "groups", "paged_decode"),
        Stage("memory that is not yours to read", "tails", "paged_decode"),
        Stage("scales, widths, dtypes and strides", "shapes", "paged_decode"),
        Stage("refusing what would be wrong", "host-checks", "paged_decode"),
    ),
)

L3 = Drill(
    "L3",
    "Split-KV decode, and merging by lse",
    "l3_split_kv",
    needs=("L2",),
    functions=(
        Function(
            "merge_splits",
            _words("o_part lse"),
            returns=("o", "lse"),
            kernel="merge_splits_kernel",
            places=HEADS,
        ),
        Function(
            "split_kv_decode",
            _words("q k_cache v_cache block_tables context_lens num_splits sm_scale return_lse"),
            returns=("o", "lse"),
            kernel="split_kv_kernel",
            places=HEADS,
        ),
    ),
    stages=(
        Stage("merging two parts", "merging", "merge_splits"),
        Stage("parts that are empty", "empty-parts", "merge_splits"),
        Stage("a sequence in splits", "splits", "split_kv_decode"),
        Stage("more splits than tokens", "short-sequences", "split_kv_decode"),
        Stage("the lse of the whole", "lse", "split_kv_decode"),
        Stage("refusing what would be wrong", "host-checks", "split_kv_decode"),
    ),
)

L4 = Drill(
    "L4",
    "The planner: a work list, one launch over it, one merge",
    "l4_planned_decode",
    needs=("L3",),
    functions=(
        Function(
            "plan_decode",
            _words("context_lens_cpu page_size num_kv_heads num_programs"),
            returns=_words("seq start end row_ptr"),
            places=dict.fromkeys(("seq", "start", "end"), "work item {0}")
            | {"row_ptr": "row_ptr[{0}], where the items of sequence {0} begin"},
        ),
        Function(
            "planned_decode",
            _words("q k_cache v_cache block_tables work sm_scale return_lse"),
            returns=("o", "lse"),
            kernel="planned_decode_kernel",
            places=HEADS,
        ),
    ),
    stages=(
        Stage("a list that covers the batch", "work-list", "plan_decode"),
        Stage("the smallest chunk that fits", "search", "plan_decode"),
        Stage("lists of a fixed size", "fixed-size", "plan_decode"),
        Stage("decode over a list", "decode", "planned_decode"),
        Stage("merging what was cut", "merging", "planned_decode"),
        Stage("one plan, many layers, one graph", "capture", "planned_decode"),
        Stage("refusing what would be wrong", "host-checks", "planned_decode"),
    ),
)

F1 = Drill(
    "F1",
    "Block tables as FlashInfer's CSR pages; plan and run",
    "f1_flashinfer_paged",
    needs=("L1", "L3"),
    functions=(
        Function(
            "block_table_to_csr",
            _words("block_tables context_lens page_size"),
            returns=_words("indptr indices last_page_len"),
            places={"last_page_len": "sequence {0}, which has {context_lens} tokens"},
        ),
        Function(
            "csr_to_block_table",
            _words("indptr indices last_page_len page_size max_blocks"),
            returns=_words("block_tables context_lens"),
            places={"block_tables": "sequence {0}, column {1}", "context_lens": "sequence {0}"},
        ),
        Function(
            "flashinfer_decode",
            _words("q k_cache v_cache block_tables context_lens return_lse"),
            returns=("o", "lse"),
            places=HEADS,
        ),
        Function(
            "flashinfer_decode_layers",
            _words("qs kv_caches block_tables context_lens"),
            returns=("o",),
            places={"o": HEADS["o"]},
        ),
        Function(
            "block_table_to_csr_into",
            _words("block_tables context_lens page_size indptr indices last_page_len"),
            writes=("indptr", "indices", "last_page_len"),
            kernel="block_table_to_csr_kernel",
            places={"last_page_len": "sequence {0}, which has {context_lens} tokens"},
        ),
    ),
    stages=(
        Stage("block table to CSR", "csr", "block_table_to_csr"),
        Stage("CSR at its edges", "csr-edges", "block_table_to_csr"),
        Stage("CSR to block table", "way-back", "csr_to_block_table"),
        Stage("plan and run", "plan-run", "flashinfer_decode"),
        Stage("what FlashInfer does not notice", "silent", "flashinfer_decode"),
        Stage("one plan for all layers", "layers", "flashinfer_decode_layers"),
        Stage("without a host read", "sync-free", "block_table_to_csr_into"),
    ),
)

DRILLS: tuple[Drill, ...] = (L1, L2, L3, L4, F1)


def find(name: str) -> Drill:
    """The drill called `name`: its id in any case, or its module. Raises KeyError with the choices."""
    for drill in DRILLS:
        if name.lower() in (drill.id.lower(), drill.module, drill.file):
            return drill
    raise KeyError(f"no drill is called {name!r}; there are {', '.join(d.id for d in DRILLS)}")


def owner(function: str) -> tuple[Drill, Function]:
    """The drill and the entry of a function, by its name, which only one drill has."""
    return next((d, f) for d in DRILLS for f in d.functions if f.name == function)
