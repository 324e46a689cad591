"""The drills: the one place that lists them. README's table, the command line and the stubs' check read this."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Function:
    """One function a learner writes: its arguments in order, and which of them it changes in place."""

    name: str
    arguments: tuple[str, ...]
    returns: tuple[str, ...] = ()  # what the parts of its result are called
    writes: tuple[str, ...] = ()
    kernel: str | None = None  # the Triton kernel that must do the writing

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


L1 = Drill(
    "L1",
    "Write K and V into the paged cache",
    "l1_paged_kv_write",
    functions=(
        Function("slot_mapping", _words("block_table seq_idx positions block_size"), returns=("slots",)),
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
        ),
        Function(
            "csr_to_block_table",
            _words("indptr indices last_page_len page_size max_blocks"),
            returns=_words("block_tables context_lens"),
        ),
        Function(
            "flashinfer_decode",
            _words("q k_cache v_cache block_tables context_lens return_lse"),
            returns=("o", "lse"),
        ),
        Function("flashinfer_decode_layers", _words("qs kv_caches block_tables context_lens"), returns=("o",)),
        Function(
            "block_table_to_csr_into",
            _words("block_tables context_lens page_size indptr indices last_page_len"),
            writes=("indptr", "indices", "last_page_len"),
            kernel="block_table_to_csr_kernel",
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

DRILLS: tuple[Drill, ...] = (L1, F1)


def find(name: str) -> Drill:
    """The drill called `name`: its id in any case, or its module. Raises KeyError with the choices."""
    for drill in DRILLS:
        if name.lower() in (drill.id.lower(), drill.module, drill.file):
            return drill
    raise KeyError(f"no drill is called {name!r}; there are {', '.join(d.id for d in DRILLS)}")


def owner(function: str) -> tuple[Drill, Function]:
    """The drill and the entry of a function, by its name, which only one drill has."""
    return next((d, f) for d in DRILLS for f in d.functions if f.name == function)
