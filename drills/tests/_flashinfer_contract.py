"""A strict stand-in for FlashInfer's paged decode wrapper, for machines without a GPU.

It takes the arguments of FlashInfer 0.7, computes the attention in float64 with plain PyTorch, and refuses
what the real wrapper refuses. It is stricter on purpose: the real one hands most of what it gets to a kernel
as bare pointers, so a wrong page id, shape or layout gives wrong numbers and no error. Here each of those is
an error that says what was seen and what is needed. Call `install()` before importing the code under test.
"""

from __future__ import annotations

import bisect
import functools
import importlib
import importlib.machinery
import importlib.metadata
import math
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Cache = Tensor | tuple[Tensor, Tensor]

# What plan() takes after page_size, by keyword only, with the defaults.
PLAN_KEYWORDS: dict[str, Any] = {"pos_encoding_mode": "NONE", "rope_scale": None, "rope_theta": None}
PLAN_KEYWORDS |= {"window_left": -1, "window_right": 0, "logits_soft_cap": None, "sm_scale": None}
PLAN_KEYWORDS |= {"q_data_type": "float16", "kv_data_type": None, "o_data_type": None, "data_type": None}
PLAN_KEYWORDS |= {"non_blocking": True, "fixed_split_size": None, "disable_split_kv": False}
PLAN_KEYWORDS |= {"block_tables": None, "seq_lens": None, "q_len_per_req": 1, "is_causal": None}
PLAN_KEYWORDS |= {"use_token_head_sf": False}
# These have to keep their defaults: they change the result in a way not written below, or repeat the CSR.
_NOT_MODELLED = ["pos_encoding_mode", "window_right", "q_len_per_req", "is_causal", "use_token_head_sf"]
_NOT_MODELLED += ["block_tables", "seq_lens"]

_GROUPS = (1, 2, 3, 4, 6, 8, 16)  # the group sizes that the kernel without tensor cores is compiled for


class SilentlyWrong(ValueError):
    """What only the stand-in refuses: code that comes to this has no check of its own, and is wrong on a GPU."""


def _silent(message: str) -> SilentlyWrong:
    return SilentlyWrong(f"{message} (the real wrapper would not notice: it returns wrong numbers)")


def _need_default(name: str, seen: Any, default: Any) -> None:
    if isinstance(seen, (Tensor, tuple)) or seen != default:
        seen = repr(seen) if isinstance(seen, (str, int, float)) else f"a {type(seen).__name__}"
        raise ValueError(f"{name} is {seen}: the CPU stand-in does not model it; it has to be {default!r}")


def _capturing() -> bool:
    try:
        return bool(torch.cuda.is_current_stream_capturing())
    except RuntimeError:  # what torch raises where there is no CUDA driver
        return False


def _dtype(name: str, value: Any) -> torch.dtype:
    dtype = getattr(torch, value, None) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is {value!r}; it has to be a torch dtype, or the name of one")
    return dtype


def _check_int32(name: str, tensor: Any, device: torch.device) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; it has to be a tensor")
    if tensor.dtype != torch.int32:
        # The real plan() refuses only indptr. The rest it converts, or fails on in run().
        late = "" if name == "indptr" else " (the real wrapper does not notice it here)"
        raise ValueError(f"{name} is {tensor.dtype}; it has to be torch.int32{late}")
    if tensor.ndim != 1:
        raise _silent(f"{name} has shape {list(tensor.shape)}; it has to have one dimension")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; it has to be on {device}, like the workspace")


def _check_csr(indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int) -> None:
    rows, pages, last = indptr.tolist(), indices.tolist(), last_page_len.tolist()
    if not last:
        raise ValueError("last_page_len is empty; a batch has to have a sequence")
    if len(rows) != len(last) + 1:
        raise _silent(f"indptr has {len(rows)} entries; a batch of {len(last)} needs {len(last) + 1}")
    if rows[0] != 0:
        raise _silent(f"indptr starts at {rows[0]}; it has to start at 0")
    for i, (start, end, tokens) in enumerate(zip(rows, rows[1:], last)):
        if start > end:
            raise _silent(f"indptr goes from {start} down to {end} at sequence {i}; it must never decrease")
        # A row without pages is the padding of a captured batch: nothing of it is read, 0 tokens are fine.
        least = 1 if start < end else 0
        if not least <= tokens <= page_size:
            raise _silent(f"last_page_len[{i}] is {tokens}; it has to be in {least}..{page_size} (page_size)")
    # Longer than indptr[-1] is fine, for the real one too: the fixed buffers of a captured batch are longer.
    if len(pages) < rows[-1]:
        raise _silent(f"indices has {len(pages)} page ids; indptr[-1] = {rows[-1]} needs as many")
    for i, page in enumerate(pages[: rows[-1]]):
        if page < 0:
            raise _silent(f"indices[{i}] is {page}; a page id has to be 0 or above")


def _workspace_needed(pages: list[int], plan: SimpleNamespace, use_cuda_graph: bool) -> int:
    """About the least float workspace, in bytes, with which the real planner takes these page counts."""
    # Split-KV: sequences are cut into chunks of whole pages, 128 tokens or more, the smallest for which
    # chunks times KV heads do not exceed the CTAs that the card holds at once (here 4 on each of 132 SMs).
    # Until they are merged, every chunk keeps an output row and an lse for each query head, in float32. A
    # batch that fills the card is not split. A captured batch reserves every chunk that later plans may use.
    most, least = 132 * 4 // plan.num_kv_heads, max(128 // plan.page_size, 1)
    if len(pages) >= most or (plan.use_tensor_cores and plan.disable_split_kv):
        return 0

    def chunks(size: int) -> int:
        return sum(-(-max(n, 1) // size) for n in pages)

    size = least + bisect.bisect_left(range(least, max(pages)), True, key=lambda n: chunks(n) <= most)
    rows = most if use_cuda_graph else chunks(size)
    return 0 if rows == len(pages) else rows * plan.num_qo_heads * (plan.head_dim + 1) * 4


class BatchDecodeWithPagedKVCacheWrapper:
    """`flashinfer.BatchDecodeWithPagedKVCacheWrapper` on the CPU."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if kv_layout not in ("NHD", "HND"):
            raise ValueError(f"kv_layout is {kv_layout!r}; it has to be 'NHD' or 'HND'")
        _need_default("backend", "auto" if backend == "fa2" else backend, "auto")
        _need_default("jit_args", jit_args, None)
        _need_default("jit_kwargs", jit_kwargs, None)
        workspace = float_workspace_buffer
        if not isinstance(workspace, Tensor):
            raise TypeError(f"float_workspace_buffer is a {type(workspace).__name__}; it has to be a tensor")
        if workspace.ndim != 1 or not workspace.is_contiguous():
            raise ValueError(f"float_workspace_buffer is {list(workspace.shape)}; it has to be 1-D, contiguous")
        if workspace.device.type != "cpu":
            raise ValueError(f"float_workspace_buffer is on {workspace.device}; it has to be on the CPU here")
        if off := workspace.data_ptr() % 16:
            raise ValueError(f"float_workspace_buffer is {off} bytes off; it has to be 16-byte aligned")
        self._workspace, self._kv_layout, self.device = workspace, kv_layout, workspace.device
        self.use_tensor_cores, self.is_cuda_graph_enabled = use_tensor_cores, use_cuda_graph
        self._planned: SimpleNamespace | None = None
        buffers: list[Any] = [paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer]
        self._buffers = buffers
        for short, buffer in zip(("indptr", "indices", "last_page_len"), buffers):
            name = f"paged_kv_{short}_buffer"
            if use_cuda_graph:
                _check_int32(name, buffer, self.device)
                if not buffer.is_contiguous():
                    raise _silent(f"{name} is strided; it has to be contiguous")
            elif buffer is not None:
                raise ValueError(f"{name} is given and would be ignored; it needs use_cuda_graph=True")
        rows, _, batch = (0 if buffer is None else len(buffer) for buffer in self._buffers)
        if use_cuda_graph and rows != batch + 1:
            raise ValueError(f"paged_kv_indptr_buffer has {rows} entries; the batch needs {batch + 1}")

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        **kwargs: Any,
    ) -> None:
        if deprecated_positional_args:
            raise TypeError(
                f"plan() got {deprecated_positional_args} by position after page_size; pass it by keyword: "
                "these arguments have shifted between releases, a position may mean another one in the next"
            )
        if unknown := kwargs.keys() - PLAN_KEYWORDS.keys():
            raise TypeError(f"plan() has no keyword {', '.join(unknown)}; it has {', '.join(PLAN_KEYWORDS)}")
        if _capturing():
            raise RuntimeError("plan() was called in a CUDA graph capture, which breaks it; call it before")
        plan = SimpleNamespace(**(PLAN_KEYWORDS | kwargs), use_tensor_cores=self.use_tensor_cores)
        plan.is_causal = plan.is_causal or None  # one query attends to every key, masked or not
        for name in _NOT_MODELLED:
            _need_default(name, getattr(plan, name), PLAN_KEYWORDS[name])
        self._plan_heads(plan, num_qo_heads, num_kv_heads, head_dim, page_size)
        if plan.fixed_split_size is not None and not self.use_tensor_cores:
            raise ValueError(f"fixed_split_size is {plan.fixed_split_size}; it needs use_tensor_cores=True")
        plan.logits_soft_cap, plan.window_left = plan.logits_soft_cap or 0.0, max(plan.window_left, -1)
        if plan.logits_soft_cap < 0:
            raise _silent(f"logits_soft_cap is {plan.logits_soft_cap}; it has to be 0 (off) or above")
        # As in the real one: data_type counts where another is None, and q_data_type is float16 if not given.
        plan.q_dtype = _dtype("q_data_type", plan.q_data_type or plan.data_type)
        plan.kv_dtype = _dtype("kv_data_type", plan.kv_data_type or plan.data_type or plan.q_dtype)
        plan.o_dtype = _dtype("o_data_type", plan.o_data_type or plan.q_dtype)

        csr = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}
        for name, tensor in csr.items():
            _check_int32(name, tensor, self.device)
        _check_csr(**csr, page_size=page_size)
        if self.is_cuda_graph_enabled:
            seen, batch, room = len(last_page_len), len(self._buffers[2]), len(self._buffers[1])
            if seen != batch:
                raise ValueError(f"last_page_len has {seen} entries; its CUDA graph buffer has {batch}")
            if len(indices) > room:
                raise ValueError(f"indices has {len(indices)} entries; its CUDA graph buffer has {room}")
        need = _workspace_needed(indptr.diff().tolist(), plan, self.is_cuda_graph_enabled)
        if need > self._workspace.nbytes:
            raise RuntimeError(
                f"float_workspace_buffer has {self._workspace.nbytes} bytes; it has to have {need} or more, "
                "for the partial outputs of split-KV (128 MiB is usual)"
            )
        plan.indptr, plan.indices, plan.last_page_len = (tensor.clone() for tensor in csr.values())
        if self.is_cuda_graph_enabled:  # run() reads the buffers, as every replay of the graph does
            for buffer, tensor in zip(self._buffers, csr.values()):
                buffer[: len(tensor)] = tensor
            _, plan.indices, plan.last_page_len = self._buffers
        self._planned = plan

    def _plan_heads(self, plan: SimpleNamespace, hq: int, hkv: int, dim: int, page_size: int) -> None:
        sizes = {"num_qo_heads": hq, "num_kv_heads": hkv, "head_dim": dim, "page_size": page_size}
        for name, value in sizes.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it has to be an int above 0")
        vars(plan).update(sizes, group=hq // hkv)
        if hq % hkv:
            raise _silent(f"num_qo_heads is {hq}; it has to be a multiple of num_kv_heads = {hkv}")
        if not self.use_tensor_cores and plan.group not in _GROUPS:
            raise ValueError(
                f"num_qo_heads / num_kv_heads is {plan.group}; the group size has to be one of {_GROUPS}, or "
                "use_tensor_cores True"
            )

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Cache | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        plan = self._after_plan()
        if _capturing() and not self.is_cuda_graph_enabled:
            raise RuntimeError(
                "run() was called in a CUDA graph capture; it needs use_cuda_graph=True and its buffers "
                "(the real wrapper would not notice: the graph replays page ids that are gone)"
            )
        if args:
            raise TypeError(f"run() got {len(args)} more arguments by position; it takes the rest by keyword")
        _need_default("sinks", sinks, None)
        _need_default("q_len_per_req", None if q_len_per_req == 1 else q_len_per_req, None)
        _need_default("skip_softmax_threshold_scale_factor", skip_softmax_threshold_scale_factor, None)
        _need_default("kv_cache_sf", kv_cache_sf, None)
        if window_left not in (None, plan.window_left):
            raise ValueError(f"window_left is {window_left}; it has to be that of plan(), {plan.window_left}")
        for name, scale in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
            if scale is not None and not isinstance(scale, (int, float)):
                raise TypeError(f"{name} is a {type(scale).__name__}; the CPU stand-in needs a float")
        shape = (len(plan.last_page_len), plan.num_qo_heads, plan.head_dim)
        k, v = self._check_inputs(plan, q, paged_kv_cache, shape)
        out = torch.empty(shape, dtype=plan.o_dtype) if out is None else out
        lse = torch.empty(shape[:2], dtype=torch.float32) if lse is None else lse
        needed = {"out": (out, [shape, plan.o_dtype]), "lse": (lse, [shape[:2], torch.float32])}
        for name, (result, need) in needed.items():
            seen, need = [tuple(result.shape), result.dtype, result.device], [*need, self.device]
            if seen != need:
                raise ValueError(f"{name} is {seen}; it has to be {need}")
            if not result.is_contiguous():
                raise _silent(f"{name} is strided; it has to be contiguous")
        if self.is_cuda_graph_enabled:
            if not torch.equal(self._buffers[0], plan.indptr):
                raise _silent("paged_kv_indptr_buffer was changed after plan(); it has to be planned again")
            _check_csr(plan.indptr, plan.indices, plan.last_page_len, plan.page_size)
        rows, last = plan.indptr.tolist(), plan.last_page_len.tolist()
        for i, page in enumerate(plan.indices[: rows[-1]].tolist()):
            if page >= len(k):
                raise _silent(f"indices[{i}] is {page}; it has to be below {len(k)}, the pages in the cache")

        scale = plan.head_dim**-0.5 if plan.sm_scale is None else plan.sm_scale
        scale *= (1.0 if q_scale is None else q_scale) * (1.0 if k_scale is None else k_scale)
        for b in range(len(last)):
            pages = plan.indices[rows[b] : rows[b + 1]].long()
            length = (len(pages) - 1) * plan.page_size + last[b] if len(pages) else 0
            first = 0 if plan.window_left < 0 else max(length - 1 - plan.window_left, 0)
            keys, values = (self._gather(cache, pages, plan)[first:length] for cache in (k, v))
            logits = torch.einsum("hd,lhd->lh", q[b].double(), keys) * scale
            if plan.logits_soft_cap:
                logits = plan.logits_soft_cap * torch.tanh(logits / plan.logits_soft_cap)
            o = torch.einsum("lh,lhd->hd", logits.softmax(0), values)
            out[b] = o * (1.0 if v_scale is None else v_scale)
            lse[b] = logits.logsumexp(0) / math.log(2)  # FlashInfer's lse is in base 2
        return (out, lse) if return_lse else out

    def _after_plan(self) -> SimpleNamespace:
        if self._planned is None:
            raise RuntimeError("run() was called before plan(); it needs one plan(), which serves many run()")
        return self._planned

    def _check_inputs(self, plan: SimpleNamespace, q: Tensor, cache: Any, q_shape: tuple) -> Any:
        if isinstance(cache, Tensor) and cache.ndim == 5 and cache.shape[1] == 2:
            cache = cache.unbind(1)
        if not isinstance(cache, tuple) or len(cache) != 2:
            seen = list(cache.shape) if isinstance(cache, Tensor) else type(cache).__name__
            raise TypeError(f"paged_kv_cache is {seen}; it has to be a tuple (k, v) or a tensor [pages, 2, ...]")
        sizes, axes = (plan.page_size, plan.num_kv_heads), "page_size, num_kv_heads"
        if self._kv_layout == "HND":
            sizes, axes = sizes[::-1], "num_kv_heads, page_size"
        shape, axes = (len(cache[0]), *sizes, plan.head_dim), f"{self._kv_layout} [pages, {axes}, head_dim]"
        for name, tensor, dtype, needed, meaning, error in (
            ("q", q, plan.q_dtype, q_shape, "[batch, num_qo_heads, head_dim]", ValueError),
            ("k_cache", cache[0], plan.kv_dtype, shape, axes, ValueError),
            ("v_cache", cache[1], plan.kv_dtype, shape, axes, _silent),
        ):
            if tensor.dtype != dtype:
                raise error(f"{name} is {tensor.dtype}; it has to be {dtype}, as plan() was told")
            if tensor.device != self.device:
                raise ValueError(f"{name} is on {tensor.device}; it has to be on {self.device}")
            if tensor.shape != needed:
                raise _silent(f"{name} has shape {list(tensor.shape)}; {meaning} as planned is {list(needed)}")
            if tensor.stride(-1) != 1 and needed[-1] != 1:
                raise _silent(f"{name} has stride {tensor.stride(-1)} in its last dimension; it has to be 1")
        k, v = cache
        if not self.use_tensor_cores and k.stride() != v.stride():
            raise ValueError(f"v_cache has strides {v.stride()}; k_cache's {k.stride()} have to be the same")
        return k, v

    def _gather(self, cache: Tensor, pages: Tensor, plan: SimpleNamespace) -> Tensor:
        """[tokens, query heads, D] of these pages, in float64. Query head h reads KV head h // group."""
        rows = cache[pages] if self._kv_layout == "NHD" else cache[pages].transpose(1, 2)
        return rows.reshape(-1, plan.num_kv_heads, plan.head_dim).double().repeat_interleave(plan.group, 1)

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: Cache,
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        _return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Deprecated upstream: what is left out here falls back to its default, whatever plan() was told."""
        plan = self._after_plan()
        seen = [pos_encoding_mode, window_left, logits_soft_cap or 0.0, sm_scale]
        planned = ["NONE", plan.window_left, plan.logits_soft_cap, plan.sm_scale or sm_scale]
        if seen != planned:
            names = "[pos_encoding_mode, window_left, logits_soft_cap, sm_scale]"
            raise _silent(f"forward()'s {names} is {seen}; plan() was told {planned}: use run()")
        plan.sm_scale = sm_scale
        scales: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        return self.run(q, paged_kv_cache, **scales, return_lse=_return_lse)

    begin_forward = plan
    run_return_lse = functools.partialmethod(run, return_lse=True)
    forward_return_lse = functools.partialmethod(forward, _return_lse=True)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    def __init__(
        self,
        workspace_buffer: Tensor,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        buffers = indptr_buffer, indices_buffer, last_page_len_buffer
        super().__init__(workspace_buffer, kv_layout, True, use_tensor_cores, *buffers)


_CLASSES = (BatchDecodeWithPagedKVCacheWrapper, CUDAGraphBatchDecodeWithPagedKVCacheWrapper)
_undo: Callable[[], None] | None = None


def install() -> None:
    """Make the stand-in what every way of importing FlashInfer gives, until `uninstall()`."""
    global _undo
    if _undo is None:
        _undo = _swap_classes() if sys.modules.get("flashinfer") else _add_modules()


def uninstall() -> None:
    global _undo
    if _undo is not None:
        _undo()
        _undo = None


def _loaded() -> dict[str, ModuleType]:
    return {name: m for name, m in sys.modules.items() if m and f"{name}.".startswith("flashinfer.")}


def _swap_classes() -> Callable[[], None]:
    """The real FlashInfer is loaded: replace the classes wherever one of its modules holds them."""
    real = [getattr(importlib.import_module("flashinfer.decode"), ours.__name__) for ours in _CLASSES]

    def swap(old: list[type], new: list[type]) -> None:
        for module in _loaded().values():
            for name, value in list(vars(module).items()):
                if isinstance(value, type) and value in old:
                    setattr(module, name, new[old.index(value)])

    swap(real, list(_CLASSES))
    return lambda: swap(list(_CLASSES), real)


def _add_modules() -> Callable[[], None]:
    """FlashInfer is not loaded and stays so: its import takes seconds, and it may not be installed."""
    spec = importlib.machinery.PathFinder.find_spec("flashinfer")
    package, decode = (_light_module(name) for name in ("flashinfer", "flashinfer.decode"))
    package.__path__ = list(spec.submodule_search_locations or ()) if spec else []
    package.__spec__.submodule_search_locations = package.__path__
    package.decode = decode
    try:
        package.__version__ = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        package.__version__ = "stand-in"
    sys.modules.update({"flashinfer": package, "flashinfer.decode": decode})

    def remove() -> None:  # real submodules too: they were imported into the light package
        for name in _loaded():
            del sys.modules[name]

    return remove


def _light_module(name: str) -> Any:
    module: Any = ModuleType(name, __doc__)
    # "cannot import name ... from" prints the file, so that a learner sees where this module comes from.
    module.__file__ = __file__
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=__file__)
    vars(module).update({cls.__name__: cls for cls in _CLASSES})

    def missing(attribute: str) -> Any:
        cause = None
        if name == "flashinfer" and not attribute.startswith("_"):
            try:
                return importlib.import_module(f"flashinfer.{attribute}")
            except ImportError as error:
                cause = error
        message = f"{name}.{attribute} is not part of the CPU stand-in ({__file__}); it needs a GPU"
        raise AttributeError(message) from cause

    module.__getattr__ = missing
    return module
