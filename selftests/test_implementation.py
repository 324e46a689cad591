"""DRILLS_IMPL and the seam: what is selected, how it is loaded, what is observed."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from drills import catalog, implementation, no_triton
from drills.implementation import NotStarted, SelectionError, Unusable
from drills.tests._paged import caches, generator, ints, numbers

TABLE, SEQ, POS = ints([[9, 3, 7], [2, 5, 0]]), ints([0, 0, 1]), ints([5, 9, 2])


@pytest.fixture
def submission(tmp_path):
    """Write a submission's l1 file, get its implementation."""

    def write(text: str, name: str = "l1_paged_kv_write.py", directory: str = "a"):
        folder = tmp_path / directory
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        return implementation.select(str(folder))

    return write


def test_the_default_is_mine(monkeypatch):
    monkeypatch.delenv("DRILLS_IMPL", raising=False)
    assert implementation.selected().directory == catalog.PACKAGE / "mine"
    monkeypatch.setenv("DRILLS_IMPL", "")
    assert implementation.selected().name == "mine"


def test_solutions_and_directories(tmp_path, submission):
    assert implementation.select("solutions").directory == catalog.PACKAGE / "solutions"
    assert submission("").directory == tmp_path / "a"


@pytest.mark.parametrize("name", ["nowhere", "Solutions", "solution", "/no/such/place", "mine2"])
def test_anything_else_lists_the_choices(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SelectionError, match=r"no such path(.|\n)*mine \(the default\), solutions, or a directory"):
        implementation.select(name)


def test_a_file_and_an_empty_directory(tmp_path):
    (tmp_path / "x.py").write_text("")
    with pytest.raises(SelectionError, match="that is a file"):
        implementation.select(str(tmp_path / "x.py"))
    with pytest.raises(SelectionError, match="DRILLS_IMPL can be mine"):
        implementation.select("~nobody-of-this-name/drills")
    with pytest.raises(SelectionError, match=r"holds none of l1_paged_kv_write\.py"):
        implementation.select(str(tmp_path))


def test_an_absent_file_is_named_by_its_path(submission, tmp_path):
    impl = submission("")
    with pytest.raises(Unusable, match=rf"{tmp_path}/a/f1_flashinfer_paged\.py does not exist"):
        impl.function("csr_to_block_table")


def test_a_missing_function_fails_alone(submission):
    impl = submission("def slot_mapping(b, s, p, n): return p.long()")
    assert impl.run("slot_mapping", TABLE, SEQ, POS, 4).raised is None
    with pytest.raises(Unusable, match=r"defines no reshape_and_cache(.|\n)*key, value, k_cache, v_cache, slots"):
        impl.function("reshape_and_cache")


def test_a_syntax_error_shows_the_line(submission):
    with pytest.raises(Unusable, match=r"syntax error(.|\n)*l1_paged_kv_write.py:2   x = \(1"):
        submission("import os\nx = (1\n").function("slot_mapping")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 / 0", r"ZeroDivisionError: division by zero(.|\n)*l1_paged_kv_write.py:1   1 / 0"),
        ("import sys\nsys.exit(0)", r"called sys.exit\(0\)(.|\n)*:2   sys.exit\(0\)"),
        ("import nonexistent_thing", "ModuleNotFoundError"),
        ("from drills.solutions.l1_paged_kv_write import *", "not for an implementation to import"),
        ("import drills.tests._oracle", "not for an implementation to import"),
    ],
)
def test_what_goes_wrong_on_import(submission, text, said):
    impl = submission(text)
    for _ in range(2):  # the second test that asks is told the same
        with pytest.raises(Unusable, match=said):
            impl.function("slot_mapping")


def test_two_directories_do_not_see_each_other(submission):
    helper = "VALUE = {}\n"
    text = "from .helper import VALUE\ndef slot_mapping(b, s, p, n): return p.long() * 0 + VALUE\n"
    impls = []
    for directory, value in (("a", 1), ("b", 2)):
        submission(text, directory=directory)
        impls.append(submission(helper.format(value), "helper.py", directory))
    for _ in range(2):
        for impl, value in zip(impls, (1, 2)):
            assert impl.run("slot_mapping", TABLE, SEQ, POS, 4).returned.tolist() == [value] * 3


def test_an_edit_is_seen_at_once(submission):
    """Two versions of one size in one second: a cached bytecode file would run the first again."""
    for value in (1, 2, 3):
        impl = submission(f"def slot_mapping(b, s, p, n): return p.long() * 0 + {value}\n")
        assert impl.run("slot_mapping", TABLE, SEQ, POS, 4).returned[0] == value


def test_not_started(submission):
    impl = submission("def slot_mapping(b, s, p, n):\n    raise NotImplementedError('later')\n")
    with pytest.raises(NotStarted, match="L1 slot_mapping"):
        impl.run("slot_mapping", TABLE, SEQ, POS, 4)


def test_arguments_that_are_not_to_be_written(submission):
    impl = submission("def slot_mapping(b, s, p, n):\n    p += 1\n    return p.long()\n")
    assert impl.run("slot_mapping", TABLE, SEQ, POS.clone(), 4).disturbed == ["positions"]


def test_the_learners_lines(submission):
    impl = submission("def helper(x):\n    return x[99]\n\ndef slot_mapping(b, s, p, n):\n    return helper(p)\n")
    outcome = impl.run("slot_mapping", TABLE, SEQ, POS, 4)
    assert isinstance(outcome.raised, IndexError)
    assert [line.split("   ")[1] for line in outcome.where] == ["return helper(p)", "return x[99]"]


READS = {
    "p[0].item()": 1,
    "int(p[0])": 1,
    "bool((p > 0).all())": 1,
    "p.tolist()": 3,
    "p.cpu()": 3,
    "p.to('cpu')": 3,
    "p.numpy()": 3,
    "p[p > 2]": 1,
    "p.nonzero()": 1,
    "torch.masked_select(p, p > 2)": 1,
    "torch.repeat_interleave(p, p)": 1,
    "torch.unique(p)": 1,
    "p + 1": 0,
    "p[torch.tensor([0, 1])]": 0,
    "torch.where(p > 2, p, 0)": 0,
    "torch.repeat_interleave(p, p, output_size=16)": 0,
    "p.clone().masked_fill_(p > 2, 0)": 0,
    "p.clone().__setitem__(p > 2, 0)": 0,
    "p.cumsum(0)": 0,
    "p.shape[0] + len(p) + p.numel()": 0,
    "p.to(torch.int64)": 0,
}


@pytest.mark.parametrize("expression", READS)
def test_host_reads(submission, expression):
    impl = submission(f"import torch\ndef slot_mapping(b, s, p, n):\n    {expression}\n    return p.long()\n")
    seen = impl.run("slot_mapping", TABLE, SEQ, POS, 4).observed
    assert seen.values_read == READS[expression], seen.host_reads


def test_launches_and_torch_writes():
    rng = generator(0)
    args = [numbers(rng, (2, 2, 4), torch.float32) for _ in "kv"] + [*caches(2, 4, 2, 4), ints([1, 6], torch.int64)]
    seen = implementation.select("solutions").run("reshape_and_cache", *args).observed
    assert seen.launches == {"reshape_and_cache_kernel": 1}
    assert not seen.torch_writes

    def reshape_and_cache(key, value, k_cache, v_cache, slots):
        k_cache.view(-1, 2, 4)[slots] = key

    seen = implementation.reference_with(reshape_and_cache, "x").run("reshape_and_cache", *args).observed
    assert seen.torch_writes == ["aten::index_put_"]
    assert not seen.launches

    def reshape_and_cache(key, value, k_cache, v_cache, slots):  # type: ignore[no-redef]  # noqa: F811
        torch.add(key[0], 0, out=k_cache[0, 1])

    seen = implementation.reference_with(reshape_and_cache, "x").run("reshape_and_cache", *args).observed
    assert seen.torch_writes == ["aten::add"]


def test_torch_within_a_kernel(submission):
    """The interpreter runs a kernel as Python, where torch can be called: on a GPU there is none."""
    source = """
import triton, triton.language as tl

@triton.jit
def reshape_and_cache_kernel(slots):
    do()

def reshape_and_cache(key, value, k_cache, v_cache, slots):
    global do
    do = lambda: k_cache.view(-1, 2, 4).index_copy_(0, slots, key)
    reshape_and_cache_kernel[(1,)](slots)
"""
    args = [torch.ones(1, 2, 4)] * 2 + [*caches(2, 4, 2, 4), ints([6], torch.int64)]
    assert "aten::index_copy_" in submission(source).run("reshape_and_cache", *args).observed.torch_in_kernels
    assert not implementation.select("solutions").run("reshape_and_cache", *args).observed.torch_in_kernels


@pytest.mark.parametrize(
    ("raises", "said"),
    [
        ("class E(Exception):\n        def __str__(self): 1 / 0\n    raise E", "its message cannot be had"),
        ("a, b = ValueError('one'), ValueError('two')\n    a.__cause__, b.__cause__ = b, a\n    raise a", "one"),
        ("raise ValueError('\\x1b[2Jcleared')", "\ufffd[2Jcleared"),
    ],
    ids=["no message", "a cycle of causes", "a terminal's command"],
)
def test_odd_exceptions(submission, raises, said):
    outcome = submission(f"def slot_mapping(b, s, p, n):\n    {raises}\n").run("slot_mapping", TABLE, SEQ, POS, 4)
    assert said in implementation.first_line(outcome.raised)
    assert len(outcome.where) == 1


def test_a_time_out_ends_the_test(submission):
    """Hypothesis tries a call that failed again: one that ran out of time must not run a second time."""
    impl = submission("import pytest\ncalls = 0\ndef slot_mapping(b, s, p, n): pytest.fail('Timeout (>1.0s)')\n")
    with pytest.raises(pytest.fail.Exception) as first:
        impl.run("slot_mapping", TABLE, SEQ, POS, 4)
    with pytest.raises(pytest.fail.Exception) as second:
        impl.run("slot_mapping", TABLE, SEQ, POS, 4)
    assert second.value is first.value


def test_flashinfer_calls_are_counted():
    q, cache = torch.randn(1, 2, 64).half(), torch.randn(3, 4, 2, 64).half()
    layers = [q] * 3, [(cache, cache)] * 3, ints([[1]]), ints([3])
    seen = implementation.select("solutions").run("flashinfer_decode_layers", *layers).observed
    assert seen.wrapper == {"constructed": 1, "planned": 1, "run": 3}


def test_pretending_to_capture(submission):
    impl = submission("import torch\ndef slot_mapping(b, s, p, n): return torch.cuda.is_current_stream_capturing()\n")
    assert impl.run("slot_mapping", TABLE, SEQ, POS, 4).returned is False
    assert impl.run("slot_mapping", TABLE, SEQ, POS, 4, capturing=True).returned is True


def test_where_triton_has_no_build(monkeypatch, submission):
    """On macOS: the module imports and slot_mapping runs; a launch says what is missing."""
    monkeypatch.setattr(no_triton, "MISSING", True)
    hidden = {name: sys.modules[name] for name in sys.modules if name == "triton" or name.startswith("triton.")}
    for name in hidden:
        monkeypatch.delitem(sys.modules, name)
    no_triton.install_if_missing()
    try:
        source = (catalog.PACKAGE / "solutions" / "l1_paged_kv_write.py").read_text()
        impl = submission(source)
        assert impl.function("slot_mapping")(TABLE, SEQ, POS, 4).tolist() == [13, 29, 10]
        rows = numbers(generator(0), (1, 2, 4), torch.float32)
        with pytest.raises(RuntimeError, match="cannot be launched without Triton"):
            impl.function("reshape_and_cache")(rows, rows, *caches(2, 4, 2, 4), ints([1], torch.int64))
    finally:
        for name in [name for name in sys.modules if name == "triton" or name.startswith("triton.")]:
            del sys.modules[name]
        sys.modules.update(hidden)


def test_the_interpreter_is_chosen_without_a_gpu():
    assert torch.cuda.is_available() or os.environ["TRITON_INTERPRET"] == "1"


CHEATS = [
    "from drills.solutions.l1_paged_kv_write import slot_mapping",
    "import drills.tests._oracle",
    "from drills.implementation import select\nslot_mapping = select('solutions').function('slot_mapping')",
    "from selftests.alternatives import ALTERNATIVES",
    "def __getattr__(name):\n    from drills.solutions import l1_paged_kv_write\n    return l1_paged_kv_write",
    "import sys, drills\nsys.path.insert(0, drills.__path__[0])\nfrom solutions.l1_paged_kv_write import *",
    "def slot_mapping(*args):\n    import importlib\n"
    "    return importlib.import_module('drills.solutions.l1_paged_kv_write').slot_mapping(*args)",
]


@pytest.mark.parametrize("text", CHEATS)
def test_the_reference_is_out_of_reach(submission, text, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    impl = submission(text)
    try:
        error: BaseException | None = impl.run("slot_mapping", TABLE, SEQ, POS, 4).raised
    except Unusable as unusable:
        error = unusable
    assert "not for an implementation to import" in str(error)


def test_the_oracle_is_no_attribute_either(submission):
    impl = submission("import drills\nslot_mapping = drills.tests._oracle.slot_mapping\n")
    with pytest.raises(Unusable, match="AttributeError"):
        impl.function("slot_mapping")
    import drills.tests._oracle

    assert drills.tests._oracle.__name__ == "drills.tests._oracle", "what was hidden is there again"
