"""The stand-in for FlashInfer: right where it answers, an error with a reason where it does not.

That it takes what the real wrapper takes is held against the installed FlashInfer's signatures.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.metadata
import inspect
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import drills.tests._flashinfer_contract as contract

SILENT = "would not notice"

# Lengths 9, 2, 5 in pages of 4, out of a pool of 10. The ids are no identity, and one page is in no sequence.
PAGE, HQ, HKV, D, POOL = 4, 4, 2, 8, 10
ROWS, PAGES, LAST = [0, 3, 4, 6], [9, 3, 7, 2, 5, 1], [1, 2, 1]


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def workspace(size: int = 16 << 20) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def made(**arguments: Any) -> Any:
    return contract.BatchDecodeWithPagedKVCacheWrapper(**({"float_workspace_buffer": workspace()} | arguments))


PLAN: dict[str, Any] = {
    "indptr": int32(ROWS),
    "indices": int32(PAGES),
    "last_page_len": int32(LAST),
    "num_qo_heads": HQ,
    "num_kv_heads": HKV,
    "head_dim": D,
    "page_size": PAGE,
    "q_data_type": torch.float32,
}


def planned(make: dict[str, Any] | None = None, **plan: Any) -> Any:
    wrapper = made(**(make or {}))
    wrapper.plan(**(PLAN | plan))
    return wrapper


def graph_buffers(batch: int = 3, pages: int = 8) -> dict[str, Any]:
    # Full of what a run() before plan() must not use.
    return {
        "use_cuda_graph": True,
        "paged_kv_indptr_buffer": torch.full((batch + 1,), -7, dtype=torch.int32),
        "paged_kv_indices_buffer": torch.full((pages,), -7, dtype=torch.int32),
        "paged_kv_last_page_len_buffer": torch.full((batch,), -7, dtype=torch.int32),
    }


def tensors(dtype: torch.dtype = torch.float32, hq: int = HQ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*s, generator=g) for s in ((3, hq, D), (POOL, PAGE, HKV, D), (POOL, PAGE, HKV, D)))
    # Whatever is in no sequence must not be read: the unowned pages, and what follows the last token.
    for cache in (k, v):
        cache[[0, 4, 6, 8]] = math.nan
        cache[7, 1:], cache[2, 2:], cache[1, 1:] = math.nan, math.nan, math.nan
    return q.to(dtype), k.to(dtype), v.to(dtype)


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None, window: int = -1, cap=0.0):
    """One sequence, one head, one token after the other."""
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(q.shape[:2], dtype=torch.float64)
    scale = 1 / math.sqrt(D) if scale is None else scale
    for b, (start, end, last) in enumerate(zip(ROWS, ROWS[1:], LAST)):
        length = (end - start - 1) * PAGE + last
        first = max(0, length - 1 - window) if window >= 0 else 0
        for h in range(q.shape[1]):
            kv = h // (q.shape[1] // HKV)
            logits, rows = [], []
            for t in range(first, length):
                page, slot = PAGES[start + t // PAGE], t % PAGE
                logit = float(torch.dot(q[b, h].double(), k[page, slot, kv].double())) * scale
                logits.append(cap * math.tanh(logit / cap) if cap else logit)
                rows.append(v[page, slot, kv].double())
            weights = [math.exp(x) for x in logits]
            out[b, h] = sum(w * row for w, row in zip(weights, rows, strict=True)) / sum(weights)
            lse[b, h] = math.log2(sum(weights))
    return out, lse


def check(result: Any, want: tuple[torch.Tensor, torch.Tensor]) -> None:
    torch.testing.assert_close(result[0].double(), want[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(result[1].double(), want[1], atol=1e-5, rtol=1e-6)


# ---------------------------------------------------------------- what it computes


def test_equals_the_obvious_softmax_with_lse_in_base_2() -> None:
    q, k, v = tensors()
    o, lse = planned().run(q, (k, v), return_lse=True)
    assert (o.dtype, lse.dtype, lse.shape) == (torch.float32, torch.float32, (3, HQ))
    check((o, lse), expected(q, k, v))


def test_one_token_gives_the_logit_in_base_2() -> None:
    wrapper = planned(indptr=int32([0, 1]), indices=int32([3]), last_page_len=int32([1]), sm_scale=1.0)
    q, k = torch.zeros(1, HQ, D), torch.zeros(POOL, PAGE, HKV, D)
    q[..., 0], k[3, 0, :, 0] = 1.0, 2.5
    _, lse = wrapper.run_return_lse(q, (k, k))
    torch.testing.assert_close(lse, torch.full((1, HQ), 2.5 * math.log2(math.e)))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("five_d", [False, True])
def test_layouts_and_forms_of_the_cache(layout: str, five_d: bool) -> None:
    q, k, v = tensors()
    want = expected(q, k, v)
    if layout == "HND":
        k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    cache = torch.stack((k, v), 1) if five_d else (k, v)
    check(planned({"kv_layout": layout}).run(q, cache, return_lse=True), want)


def test_out_and_lse_are_filled_and_returned() -> None:
    q, k, v = tensors()
    out, lse = torch.empty(3, HQ, D), torch.empty(3, HQ)
    o = planned().run(q, (k, v), out=out, lse=lse)
    assert o is out
    check((out, lse), expected(q, k, v))
    both = planned().run_return_lse(q, (k, v), out=out, lse=lse)
    assert both[0] is out and both[1] is lse


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_output_dtype_is_that_of_q_or_the_one_asked_for(dtype: torch.dtype) -> None:
    q, k, v = tensors(dtype)
    o = planned(q_data_type=dtype).run(q, (k, v))
    assert torch.equal(o, expected(q, k, v)[0].to(dtype))  # float64 until the last rounding
    assert planned(q_data_type=dtype, o_data_type="float32").run(q, (k, v)).dtype == torch.float32


def test_the_data_types_default_as_in_the_real_one() -> None:
    q, k, v = tensors(torch.float16)
    plan = {name: value for name, value in PLAN.items() if name != "q_data_type"}
    wrapper = made()
    wrapper.plan(**plan)
    wrapper.run(q, (k, v))
    wrapper.plan(**plan, data_type="bfloat16")  # moves K and V only
    wrapper.run(q, (k.bfloat16(), v.bfloat16()))


def test_scales_window_and_soft_cap() -> None:
    q, k, v = tensors()
    check(planned(sm_scale=0.3).run(q, (k, v), return_lse=True), expected(q, k, v, scale=0.3))
    o, lse = planned(sm_scale=0.3).run(q, (k, v), q_scale=2.0, k_scale=0.5, v_scale=3.0, return_lse=True)
    check((o / 3, lse), expected(q, k, v, scale=0.3))
    check(planned(window_left=2).run(q, (k, v), return_lse=True), expected(q, k, v, window=2))
    check(planned(logits_soft_cap=1.5).run(q, (k, v), return_lse=True), expected(q, k, v, cap=1.5))


@pytest.mark.parametrize("group", [5, 7, 12])
def test_any_whole_group_with_tensor_cores(group: int) -> None:
    q, k, v = tensors(hq=group * HKV)
    wrapper = planned({"use_tensor_cores": True}, num_qo_heads=group * HKV)
    check(wrapper.run(q, (k, v), return_lse=True), expected(q, k, v))


def test_plan_copies_what_it_is_given() -> None:
    q, k, v = tensors()
    csr = {name: PLAN[name].clone() for name in ("indptr", "indices", "last_page_len")}
    wrapper = planned(**csr)
    for tensor in csr.values():
        tensor.fill_(0)
    check(wrapper.run(q, (k, v), return_lse=True), expected(q, k, v))


def test_the_legacy_names() -> None:
    q, k, v = tensors()
    wrapper = made()
    wrapper.begin_forward(**PLAN)
    check(wrapper.forward_return_lse(q, (k, v), sm_scale=0.3), expected(q, k, v, scale=0.3))
    torch.testing.assert_close(wrapper.forward(q, (k, v), sm_scale=0.3).double(), expected(q, k, v, scale=0.3)[0])
    with pytest.raises(ValueError, match=f"forward.*window_left.*{SILENT}"):
        wrapper.forward(q, (k, v), window_left=3)
    with pytest.raises(ValueError, match=f"sm_scale.*{SILENT}"):
        planned(sm_scale=0.3).forward(q, (k, v))


# ---------------------------------------------------------------- CUDA graphs


def test_graph_mode_fills_the_buffers_and_run_reads_them() -> None:
    q, k, v = tensors()
    buffers = graph_buffers()
    wrapper = planned(buffers)
    assert buffers["paged_kv_indptr_buffer"].tolist() == ROWS
    assert buffers["paged_kv_indices_buffer"].tolist() == [
        *PAGES,
        -7,
        -7,
    ]  # longer: what follows is not looked at
    assert buffers["paged_kv_last_page_len_buffer"].tolist() == LAST
    check(wrapper.run(q, (k, v), return_lse=True), expected(q, k, v))
    buffers["paged_kv_indices_buffer"][0] = 0  # a page full of NaN
    assert wrapper.run(q, (k, v))[0].isnan().all()
    buffers["paged_kv_indices_buffer"][0] = -1
    with pytest.raises(ValueError, match=rf"indices\[0\] is -1.*{SILENT}"):
        wrapper.run(q, (k, v))
    buffers["paged_kv_indptr_buffer"][1] = 2
    with pytest.raises(ValueError, match=f"paged_kv_indptr_buffer was changed.*{SILENT}"):
        wrapper.run(q, (k, v))


def test_a_padded_row_without_pages_is_zeros() -> None:
    q, k, v = tensors()
    wrapper = planned(
        graph_buffers(),
        indptr=int32([0, 3, 3, 5]),
        indices=int32([9, 3, 7, 5, 1]),
        last_page_len=int32([1, 0, 1]),
    )
    o, lse = wrapper.run(q, (k, v), return_lse=True)
    assert not o[1].any() and torch.isinf(lse[1]).all() and not o[[0, 2]].isnan().any()


def test_the_graph_subclass() -> None:
    q, k, v = tensors()
    _, *buffers = graph_buffers().values()
    wrapper = contract.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), *buffers)
    wrapper.plan(**PLAN)
    check(wrapper.run(q, (k, v), return_lse=True), expected(q, k, v))


def test_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    plain, graph = planned(), planned(graph_buffers())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    graph.run(q, (k, v))
    with pytest.raises(RuntimeError, match=f"run.*capture.*use_cuda_graph=True.*{SILENT}"):
        plain.run(q, (k, v))
    for wrapper in (plain, graph):
        with pytest.raises(RuntimeError, match="plan.*capture"):
            wrapper.plan(**PLAN)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"paged_kv_indptr_buffer": None}, "paged_kv_indptr_buffer is a NoneType"),
        ({"paged_kv_indices_buffer": None}, "paged_kv_indices_buffer is a NoneType"),
        ({"paged_kv_last_page_len_buffer": None}, "paged_kv_last_page_len_buffer is a NoneType"),
        ({"paged_kv_indptr_buffer": int32([0] * 3)}, "paged_kv_indptr_buffer has 3 entries.* 4"),
        ({"paged_kv_indices_buffer": torch.zeros(8).long()}, "paged_kv_indices_buffer is torch.int64.*int32"),
        ({"paged_kv_indices_buffer": int32([0] * 16)[::2]}, f"paged_kv_indices_buffer is strided.*{SILENT}"),
        ({"use_cuda_graph": False}, "paged_kv_indptr_buffer is given.*use_cuda_graph=True"),
    ],
)
def test_refuses_graph_buffers(change: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        made(**(graph_buffers() | change))


@pytest.mark.parametrize(
    ("buffers", "words"),
    [
        (graph_buffers(batch=4), "last_page_len has 3 entries.* 4"),
        (graph_buffers(pages=5), "indices has 6 entries.* 5"),
    ],
)
def test_refuses_a_plan_that_does_not_fit_the_buffers(buffers: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        planned(buffers)


# ---------------------------------------------------------------- what the constructor and plan() refuse


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kv_layout": "nhd"}, "kv_layout is 'nhd'.*'NHD' or 'HND'"),
        ({"float_workspace_buffer": 1 << 20}, "float_workspace_buffer is a int"),
        ({"float_workspace_buffer": workspace().view(2, -1)}, r"float_workspace_buffer is \[2, .*1-D"),
        (
            {"float_workspace_buffer": workspace()[8:]},
            "float_workspace_buffer is 8 bytes off.*16-byte aligned",
        ),
        (
            {"float_workspace_buffer": torch.empty(64, device="meta")},
            "float_workspace_buffer is on meta.*CPU",
        ),
        ({"backend": "trtllm-gen"}, "backend is 'trtllm-gen'.*does not model"),
        ({"jit_args": ["x"]}, "jit_args is a list.*does not model"),
        ({"jit_kwargs": {"x": 1}}, "jit_kwargs is a dict.*does not model"),
    ],
)
def test_constructor_refuses(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        made(**arguments)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"indptr": torch.tensor(ROWS)}, "indptr is torch.int64.*int32$"),
        ({"indices": torch.tensor(PAGES)}, "indices is torch.int64.*int32.*does not notice"),
        ({"last_page_len": torch.tensor(LAST)}, "last_page_len is torch.int64.*int32.*does not notice"),
        ({"indices": PAGES}, "indices is a list.*tensor"),
        ({"indices": int32(PAGES).view(2, 3)}, r"indices has shape \[2, 3\].*one dimension"),
        ({"indices": int32(PAGES).to("meta")}, "indices is on meta.*cpu"),
        ({"indptr": int32([1, 3, 4, 6])}, f"indptr starts at 1.*{SILENT}"),
        ({"indptr": int32([0, 4, 3, 6])}, f"indptr goes from 4 down to 3 at sequence 1.*{SILENT}"),
        ({"indptr": int32([0])}, f"indptr has 1 entries.*batch of 3 needs 4.*{SILENT}"),
        ({"indptr": int32([0]), "last_page_len": int32([])}, "last_page_len is empty"),
        ({"indices": int32(PAGES[:5])}, rf"indices has 5 page ids.*indptr\[-1\] = 6.*{SILENT}"),
        ({"indices": int32([9, 3, -1, 2, 5, 1])}, rf"indices\[2\] is -1.*{SILENT}"),
        ({"last_page_len": int32([1, 0, 1])}, rf"last_page_len\[1\] is 0.*1\.\.4.*{SILENT}"),
        ({"last_page_len": int32([1, 2, 5])}, rf"last_page_len\[2\] is 5.*1\.\.4.*{SILENT}"),
        ({"num_qo_heads": 5}, f"num_qo_heads is 5.*multiple of num_kv_heads = 2.*{SILENT}"),
        ({"num_qo_heads": 10}, "num_qo_heads / num_kv_heads is 5.*use_tensor_cores"),
        ({"num_qo_heads": 14, "num_kv_heads": 2}, "num_qo_heads / num_kv_heads is 7.*use_tensor_cores"),
        ({"head_dim": 8.0}, "head_dim is 8.0.*int above 0"),
        ({"page_size": 0}, "page_size is 0.*int above 0"),
        ({"q_data_type": "half precision"}, "q_data_type is 'half precision'.*torch dtype"),
        ({"q_data_type": None}, "q_data_type is None.*torch dtype"),
        ({"logits_soft_cap": -1.0}, f"logits_soft_cap is -1.0.*{SILENT}"),
        ({"fixed_split_size": 4}, "fixed_split_size is 4.*use_tensor_cores=True"),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "pos_encoding_mode is 'ROPE_LLAMA'.*does not model"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode is 'ALIBI'.*does not model"),
        ({"window_right": 2}, "window_right is 2.*does not model"),
        ({"q_len_per_req": 2}, "q_len_per_req is 2.*does not model"),
        ({"is_causal": True}, "is_causal is True.*does not model"),
        ({"use_token_head_sf": True}, "use_token_head_sf is True.*does not model"),
        ({"seq_lens": int32([9, 2, 5])}, "seq_lens is a Tensor.*does not model"),
        ({"block_tables": torch.zeros(3, 3)}, "block_tables is a Tensor.*does not model"),
        ({"softmax_scale": 1.0}, "no keyword softmax_scale; it has .*sm_scale"),
    ],
)
def test_plan_refuses(plan: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        planned(**plan)


def test_plan_refuses_more_positional_arguments() -> None:
    with pytest.raises(TypeError, match="plan.*'NONE'.*by keyword.*shifted between releases"):
        made().plan(int32(ROWS), int32(PAGES), int32(LAST), HQ, HKV, D, PAGE, "NONE")


def test_what_changes_no_result_is_taken() -> None:
    q, k, v = tensors()
    wrapper = planned(
        {"use_tensor_cores": True, "backend": "fa2"},
        indices=int32([*PAGES, -1, 99]),  # longer than indptr[-1]
        non_blocking=False,
        rope_theta=1e4,
        fixed_split_size=4,
        disable_split_kv=True,
        is_causal=False,
        q_len_per_req=1,
    )
    check(wrapper.run(q, (k, v), return_lse=True, enable_pdl=True, window_left=-1), expected(q, k, v))


def test_workspace() -> None:
    long: dict[str, Any] = {
        "indptr": int32([0, 2048]),
        "indices": torch.arange(2048, dtype=torch.int32),
        "last_page_len": int32([16]),
    }
    shape: dict[str, Any] = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16}
    with pytest.raises(RuntimeError, match="float_workspace_buffer has 1024 bytes.* or more.*split-KV"):
        planned({"float_workspace_buffer": workspace(1024)}, **long, **shape)
    planned(**long, **shape)
    planned({"float_workspace_buffer": workspace(1024)})  # nothing is split
    with pytest.raises(RuntimeError, match="float_workspace_buffer"):
        planned(graph_buffers() | {"float_workspace_buffer": workspace(1024)})  # captured: room for later plans
    for hq, hkv, d, batch in ((16, 1, 256, 1), (128, 8, 256, 65), (32, 8, 128, 64), (1, 1, 8, 527)):
        csr: dict[str, Any] = {
            "indptr": 64 * torch.arange(batch + 1, dtype=torch.int32),
            "indices": torch.zeros(64 * batch, dtype=torch.int32),
            "last_page_len": torch.ones(batch, dtype=torch.int32),
        }
        planned(**csr, num_qo_heads=hq, num_kv_heads=hkv, head_dim=d, page_size=1)


# ---------------------------------------------------------------- what run() refuses


def test_run_before_plan() -> None:
    q, k, v = tensors()
    for call in (made().run, made().run_return_lse, made().forward):
        with pytest.raises(RuntimeError, match="before plan"):
            call(q, (k, v))


Q, K, V = tensors()


@pytest.mark.parametrize(
    ("q", "cache", "words"),
    [
        (Q.half(), (K, V), "q is torch.float16.*torch.float32.*plan"),
        (Q, (K.half(), V), "k_cache is torch.float16.*torch.float32.*plan"),
        (Q, (K, V.half()), f"v_cache is torch.float16.*torch.float32.*{SILENT}"),
        (Q[:2], (K, V), rf"q has shape \[2, 4, 8\].*\[3, 4, 8\].*{SILENT}"),
        (torch.cat((Q, Q)), (K, V), rf"q has shape \[6, 4, 8\].*\[3, 4, 8\].*{SILENT}"),
        (torch.cat((Q, Q), 1), (K, V), rf"q has shape \[3, 8, 8\].*\[3, 4, 8\].*{SILENT}"),
        (Q[..., :4].contiguous(), (K, V), rf"q has shape \[3, 4, 4\].*{SILENT}"),
        (
            Q,
            (K[:, :2], V[:, :2]),
            rf"k_cache has shape \[10, 2, 2, 8\].*NHD.*page_size.*\[10, 4, 2, 8\].*{SILENT}",
        ),
        (Q, (K[:, :, :1], V), rf"k_cache has shape \[10, 4, 1, 8\].*num_kv_heads.*{SILENT}"),
        (Q, (K, V[:8]), rf"v_cache has shape \[8, 4, 2, 8\].*{SILENT}"),
        (Q, (K.transpose(1, 2), V.transpose(1, 2)), rf"k_cache has shape \[10, 2, 4, 8\].*NHD.*{SILENT}"),
        (Q.mT.contiguous().mT, (K, V), f"q has stride 4 in its last dimension.*{SILENT}"),
        (Q, (K.mT.contiguous().mT, V), f"k_cache has stride 2 in its last.*{SILENT}"),
        (Q, (K, V.mT.contiguous().mT), f"v_cache has stride 2 in its last.*{SILENT}"),
        (Q, (K, torch.stack((V, V), 1)[:, 0]), "v_cache has strides.*k_cache"),
        (Q, (K[:9], V[:9]), rf"indices\[0\] is 9.*below 9.*{SILENT}"),
        (Q.to("meta"), (K, V), "q is on meta.*cpu"),
        (Q, (K, V.to("meta")), "v_cache is on meta.*cpu"),
        (Q, [K, V], r"paged_kv_cache is list.*tuple \(k, v\)"),
        (Q, K, r"paged_kv_cache is \[10, 4, 2, 8\].*\[pages, 2"),
    ],
)
def test_run_refuses_inputs(q: torch.Tensor, cache: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        planned().run(q, cache)


def test_refuses_nhd_data_in_an_hnd_wrapper() -> None:
    with pytest.raises(ValueError, match=rf"k_cache.*HND \[pages, num_kv_heads, page_size, head_dim\].*{SILENT}"):
        planned({"kv_layout": "HND"}).run(Q, (K, V))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"window_left": 3}, "window_left is 3.*plan.*-1"),
        ({"sinks": torch.zeros(HQ)}, "sinks is a Tensor.*does not model"),
        ({"q_len_per_req": 2}, "q_len_per_req is 2.*does not model"),
        (
            {"skip_softmax_threshold_scale_factor": 0.1},
            "skip_softmax_threshold_scale_factor is 0.1.*does not model",
        ),
        ({"kv_cache_sf": (K, V)}, "kv_cache_sf is a tuple.*does not model"),
        ({"k_scale": torch.ones(1)}, "k_scale is a Tensor.*float"),
        ({"out": torch.empty(3, HQ, D, dtype=torch.float16)}, "out is .*float16.*float32"),
        ({"out": torch.empty(2, HQ, D)}, r"out is \[\(2, 4, 8\).*\(3, 4, 8\)"),
        ({"out": torch.empty(HQ, 3, D).transpose(0, 1)}, f"out is strided.*{SILENT}"),
        ({"lse": torch.empty(3, HQ, dtype=torch.float64)}, "lse is .*float64.*float32"),
        ({"lse": torch.empty(HQ, 3).T, "return_lse": True}, f"lse is strided.*{SILENT}"),
        ({"scale": 1.0}, "unexpected keyword argument 'scale'"),
    ],
)
def test_run_refuses_arguments(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        planned().run(Q, (K, V), **arguments)


def test_run_refuses_more_positional_arguments() -> None:
    with pytest.raises(TypeError, match="1 more arguments by position.*keyword"):
        planned().run(Q, (K, V), 1.0)


# ---------------------------------------------------------------- installing it

NAMES = [cls.__name__ for cls in contract._CLASSES]
WAYS = [
    "import flashinfer; cls = flashinfer.{0}",
    "from flashinfer import {0} as cls",
    "import flashinfer.decode; cls = flashinfer.decode.{0}",
    "from flashinfer.decode import {0} as cls",
]


def imported(way: str, name: str) -> type:
    scope: dict[str, Any] = {}
    exec(way.format(name), scope)
    return scope["cls"]


def loaded() -> list[str]:
    return sorted(name for name in sys.modules if f"{name}.".startswith("flashinfer."))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if nobody had imported FlashInfer or installed the stand-in; and back."""
    with monkeypatch.context() as before:
        before.setattr(contract, "_undo", None)
        for name in loaded():
            before.delitem(sys.modules, name)
        yield
        contract.uninstall()
        for name in loaded():
            del sys.modules[name]


@pytest.fixture
def installed_package(fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small FlashInfer in the place of the real one, whose import takes seconds and starts Triton."""
    package = tmp_path / "flashinfer"
    package.mkdir()
    (package / "__init__.py").write_text("from . import cascade\nfrom .decode import *\n")
    (package / "decode.py").write_text("".join(f"class {name}: pass\n" for name in NAMES))
    (package / "cascade.py").write_text(f"from .decode import {NAMES[0]} as Under\n")
    (package / "page.py").write_text(f"from .decode import {NAMES[0]} as Seen\n")
    monkeypatch.syspath_prepend(tmp_path)
    return package


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("fresh")
def test_every_way_to_import_gives_the_stand_in(way: str) -> None:
    contract.install()
    contract.install()
    assert [imported(way, name) for name in NAMES] == list(contract._CLASSES)
    assert loaded() == ["flashinfer", "flashinfer.decode"]  # and nothing of the real one
    contract.uninstall()
    assert loaded() == []
    contract.uninstall()


def test_other_real_submodules_can_be_imported(installed_package: Path) -> None:
    contract.install()
    page = importlib.import_module("flashinfer.page")
    assert page.__file__ == str(installed_package / "page.py")
    assert page.Seen is contract.BatchDecodeWithPagedKVCacheWrapper
    assert importlib.import_module("flashinfer").cascade.Under is page.Seen  # by attribute too
    contract.uninstall()
    assert loaded() == []
    real = importlib.import_module("flashinfer")
    assert real.BatchDecodeWithPagedKVCacheWrapper.__module__ == "flashinfer.decode"


def test_a_loaded_flashinfer_is_patched_and_restored(installed_package: Path) -> None:
    flashinfer = importlib.import_module("flashinfer")
    real = [getattr(flashinfer, name) for name in NAMES]
    contract.install()
    contract.install()
    for way in WAYS:
        assert [imported(way, name) for name in NAMES] == list(contract._CLASSES)
    assert flashinfer.cascade.Under is contract.BatchDecodeWithPagedKVCacheWrapper
    contract.uninstall()
    for way in WAYS:
        assert [imported(way, name) for name in NAMES] == real
    assert flashinfer.cascade.Under is real[0]


@pytest.mark.usefixtures("fresh")
def test_what_is_not_there_says_so() -> None:
    contract.install()
    flashinfer = importlib.import_module("flashinfer")
    for module, name in (flashinfer, "no_such_thing"), (flashinfer.decode, "fast_decode_plan"):
        words = f"{module.__name__}.{name} is not part of the CPU stand-in.*needs a GPU"
        with pytest.raises(AttributeError, match=words):
            getattr(module, name)
    with pytest.raises(ImportError, match=r"no_such_thing.*_flashinfer_contract\.py"):
        imported("from flashinfer import {0} as cls", "no_such_thing")


@pytest.mark.usefixtures("fresh")
def test_version_and_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", {"flashinfer-python": "0.7.99"}.__getitem__)
    contract.install()
    assert importlib.import_module("flashinfer").__version__ == "0.7.99"
    contract.uninstall()
    monkeypatch.setattr(importlib.machinery.PathFinder, "find_spec", lambda *_: None)
    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    contract.install()
    flashinfer = importlib.import_module("flashinfer")
    assert (flashinfer.__version__, list(flashinfer.__path__)) == ("stand-in", [])


# ---------------------------------------------------------------- against the installed FlashInfer


@pytest.fixture(scope="module")
def real() -> dict[str, dict[str, list[list[str]]]]:
    """The parameters of the real classes' methods. Read from the source: the import would take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for name in loaded():
            patch.delitem(sys.modules, name)
        spec = importlib.machinery.PathFinder.find_spec("flashinfer")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("FlashInfer is not installed, so there is nothing to compare with")
    source = Path(spec.submodule_search_locations[0], "decode.py").read_text()
    found: dict[str, dict[str, list[list[str]]]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name in NAMES:
            # Of overloads the last is the real one.
            found[node.name] = {f.name: parsed(f.args) for f in node.body if isinstance(f, ast.FunctionDef)}
    assert sorted(found) == sorted(NAMES), f"flashinfer/decode.py defines {sorted(found)}, not {sorted(NAMES)}"
    return found


def parsed(args: ast.arguments) -> list[list[str]]:
    """Name, kind and default of each parameter, as `parameters` gives them."""
    found = []

    def add(kind: str, arg: ast.arg | None, default: ast.expr | None = None) -> None:
        if arg is not None:
            found.append([arg.arg, kind, "none" if default is None else repr(ast.literal_eval(default))])

    positional = args.posonlyargs + args.args
    for arg, default in zip(positional, [None] * (len(positional) - len(args.defaults)) + list(args.defaults)):
        add("POSITIONAL_OR_KEYWORD", arg, default)
    add("VAR_POSITIONAL", args.vararg)
    for arg, default in zip(args.kwonlyargs, args.kw_defaults):
        add("KEYWORD_ONLY", arg, default)
    add("VAR_KEYWORD", args.kwarg)
    return found


def parameters(function: Any) -> list[list[str]]:
    def shown(default: Any) -> str:
        return "none" if default is inspect.Parameter.empty else repr(default)

    return [[p.name, p.kind.name, shown(p.default)] for p in inspect.signature(function).parameters.values()]


def assert_same(what: str, ours: list[list[str]], theirs: list[list[str]]) -> None:
    names, now = [p[0] for p in ours], [p[0] for p in theirs]
    new, gone = [n for n in now if n not in names], [n for n in names if n not in now]
    moved = [n for n in names if n in now and not (new or gone) and names.index(n) != now.index(n)]
    changed = [f"{o} is now {t}" for o in ours for t in theirs if o[0] == t[0] and o != t]
    assert ours == theirs, (
        f"FlashInfer's {what} has changed: new {new}, gone {gone}, moved {moved}, changed {changed}. "
        "Bring drills/tests/_flashinfer_contract.py up to it, and see what it means for the drills."
    )


@pytest.mark.parametrize("method", ["__init__", "plan", "run", "forward"])
def test_parameters_are_the_real_ones(real: dict[str, Any], method: str) -> None:
    ours = parameters(getattr(contract.BatchDecodeWithPagedKVCacheWrapper, method))
    assert_same(method, [p for p in ours if p[0] != "_return_lse"], real[NAMES[0]][method])


def test_graph_parameters_are_the_real_ones(real: dict[str, Any]) -> None:
    ours = contract.CUDAGraphBatchDecodeWithPagedKVCacheWrapper
    assert_same(f"{NAMES[1]}.__init__", parameters(ours.__init__), real[NAMES[1]]["__init__"])


def test_plan_keywords_are_the_real_ones(real: dict[str, Any]) -> None:
    keywords = sorted([name, "KEYWORD_ONLY", repr(value)] for name, value in contract.PLAN_KEYWORDS.items())
    positional = parameters(contract.BatchDecodeWithPagedKVCacheWrapper.plan)[:-2]  # all but *args, **kwargs
    theirs = real[NAMES[0]]["_plan_impl"]
    assert_same("_plan_impl up to page_size", positional, [p for p in theirs if p[1] != "KEYWORD_ONLY"])
    assert_same("_plan_impl after page_size", keywords, sorted(p for p in theirs if p[1] == "KEYWORD_ONLY"))


def test_a_changed_signature_is_named() -> None:
    a, b, c = (parameters(lambda a, b=1, *, c=2: None)[i] for i in range(3))
    with pytest.raises(AssertionError, match=r"plan has changed: new \['c'\]"):
        assert_same("plan", [a, b], [a, c, b])
    with pytest.raises(AssertionError, match=r"plan has changed: .*moved \['a', 'b'\]"):
        assert_same("plan", [a, b], [b, a])
    with pytest.raises(AssertionError, match=r"plan has changed: .*'none'\] is now .*'1'\]"):
        assert_same("plan", [a], [["a", "POSITIONAL_OR_KEYWORD", "1"]])
