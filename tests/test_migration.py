"""docs/migration.md: every snippet, as it stands there, on tensors in the other system's layout, against float64."""

import re
from pathlib import Path

import cases
import oracle
import pytest
import torch

import m3_sparse

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "migration.md").read_text()
SNIPPETS = dict(re.findall(r"```python (\w+)\n(.*?)```", TEXT, re.DOTALL))
ROWS = 2  # of a request, where a system wants the same number for all
TOPK = 3


def problem(q_lens, page=128, seed=0):
    kv_lens = [300 + 150 * i for i in range(len(q_lens))]
    return cases.make(
        q_lens, kv_lens, heads=(8, 2), page=page, dtype=torch.bfloat16, style="clean", topk=TOPK, seed=seed
    )


def attention_wanted(case):
    args, options = case.sparse()
    return oracle.sparse_attention(*args, **options)


def packed(case):
    """vLLM's cache: [pages, 2, page, Hkv, 128]."""
    return torch.stack([case.k_cache.transpose(1, 2), case.v_cache.transpose(1, 2)], 1).contiguous()


def pools(case):
    """SGLang's: [slots, Hkv, 128], and the slot of each token of each request."""
    slots = case.block_table.long().clamp(min=0)[:, :, None] * case.page + torch.arange(case.page)
    buffers = [cache.transpose(1, 2).flatten(0, 1).contiguous() for cache in (case.k_cache, case.v_cache)]
    return buffers, slots.flatten(1)


def run(name, **names):
    space = {"torch": torch, "m3_sparse": m3_sparse, **names}
    exec(SNIPPETS[name], space)  # noqa: S102  the document, word for word
    return space


def heads_first(case):
    return case.ids.transpose(0, 1).contiguous()


def check(case, out, lse=None):
    want, want_lse = attention_wanted(case)
    oracle.check_attention(out, want_lse.float() if lse is None else lse, want, want_lse)


def msa_decode():
    case = problem([ROWS] * 3)
    given = {"q": case.q, "k": case.k_cache, "v": case.v_cache, "q2k_indices": heads_first(case)}
    check(case, run("msa_decode", **given, page_table=case.block_table, seqused_k=case.seqused_k, seqlen_q=ROWS)["out"])


def paged(name):
    case = problem([3, 1, 40])
    given = {"q": case.q, "k": case.k_cache, "v": case.v_cache, "page_table": case.block_table, **case.lengths()}
    done = run(name, **given, q2k_indices=heads_first(case), block_indices=case.ids)
    return case, done


def msa_prefill():
    case, done = paged("msa_prefill")
    check(case, done["out"], done["lse"])


def flashinfer_attention():
    case, done = paged("flashinfer_attention")
    check(case, done["out"])


def fireworks_prefill():
    case, done = paged("fireworks_prefill")
    assert done["lse"].shape == (case.q.shape[1], case.q.shape[0])
    check(case, done["out"], done["lse"].transpose(0, 1))


def vllm_prefill():
    case = problem([3, 1, 40])
    output = cases.nan_like(case.q.shape, case.q.dtype)
    run("vllm_prefill", q=case.q, kv_cache=packed(case), topk_idx=heads_first(case), block_table=case.block_table,
        cu_seqlens_q=case.cu_seqlens_q, seq_lens=case.seqused_k, sm_scale=128**-0.5, output=output)  # fmt: skip
    check(case, output)


def vllm_decode():
    case = problem([ROWS] * 3)
    output = cases.nan_like(case.q.shape, case.q.dtype)
    run("vllm_decode", q=case.q, kv_cache=packed(case), topk_idx=heads_first(case), block_table=case.block_table,
        seq_lens=case.seqused_k, sm_scale=128**-0.5, output=output, decode_query_len=ROWS)  # fmt: skip
    check(case, output)


def check_selected(case, got, **forced):
    lengths = (case.cu_seqlens_q, case.seqused_k)
    given = (case.index_q, case.index_k_cache, case.index_table)
    scores, epsilon = oracle.block_scores(*given, **case.lengths()), oracle.score_epsilon(*given, **case.lengths())
    counts = oracle.candidates(*lengths, case.index_table, case.index_k_cache.shape[1], case.index_q.shape[0])
    oracle.check_selection(got, scores, epsilon, counts, TOPK, **forced)


def flashinfer_selection():
    case = problem([3, 1, 40])
    done = run("flashinfer_selection", index_q=case.index_q, index_k_cache=case.index_k_cache, topk=TOPK,
               page_table=case.index_table, **case.lengths())  # fmt: skip
    check_selected(case, done["q2k_indices"].transpose(0, 1))


def vllm_selection():
    case = problem([ROWS] * 3)
    done = run("vllm_selection", idx_q=case.index_q, index_kv_cache=case.index_k_cache, block_table=case.index_table,
               seq_lens=case.seqused_k, topk=TOPK, init_blocks=1, local_blocks=1, decode_query_len=ROWS)  # fmt: skip
    check_selected(case, done["topk_idx"].transpose(0, 1), init=1)


def sglang_attention(page=64):
    case = problem([3, 1, 40], page=page)
    (k_buffer, v_buffer), req_to_token = pools(case)
    order = torch.tensor([2, 0, 1])
    done = run("sglang_attention", q=case.q, k_buffer=k_buffer, v_buffer=v_buffer, page_size=page,
               req_to_token=req_to_token[order], topk_idx=heads_first(case),
               req_pool_indices=order.argsort(), cu_seqlens_q=case.cu_seqlens_q, seq_lens=case.seqused_k)  # fmt: skip
    check(case, done["out"])


def sglang_store():
    generator = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 5, 2, 128, generator=generator).to(torch.bfloat16)
    index_k = torch.randn(5, 128, generator=generator).to(torch.bfloat16)
    slots = torch.tensor([130, 3, -1, 64, 191])
    buffers = {name: torch.zeros(192, 2, 128, dtype=torch.bfloat16) for name in ("k_buffer", "v_buffer")}
    index_k_buffer = torch.zeros(192, 128, dtype=torch.bfloat16)
    run("sglang_store", k=k, v=v, index_k=index_k, **buffers, index_k_buffer=index_k_buffer, page_size=64,
        out_cache_loc=slots)  # fmt: skip
    stored = slots >= 0
    for rows, pool in ((k, buffers["k_buffer"]), (v, buffers["v_buffer"]), (index_k, index_k_buffer)):
        want = torch.zeros_like(pool)
        want[slots[stored]] = rows[stored]
        assert torch.equal(pool, want)


def transformers_layout():
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(2, 8, 5, 128, generator=generator).to(torch.bfloat16)
    key, value = torch.randn(2, 2, 2, 300, 128, generator=generator).to(torch.bfloat16)
    ids = torch.tensor([0, 2, -1]).expand(2, 2, 5, 3)
    out = run("transformers_layout", query=query, key=key, value=value, block_indices=ids)["out"]
    for b in range(2):
        for h in range(8):
            logits = query[b, h].double() @ key[b, h // 4].double().T * 128**-0.5
            seen = torch.arange(300) <= torch.arange(295, 300)[:, None]
            seen &= (torch.arange(300) // 128 != 1)[None]
            want = logits.masked_fill(~seen, float("-inf")).softmax(-1) @ value[b, h // 4].double()
            assert (out[b, :, h].double() - want).abs().max() < 2e-2


CALLS = {
    "msa_decode": msa_decode, "msa_prefill": msa_prefill, "flashinfer_attention": flashinfer_attention,
    "flashinfer_selection": flashinfer_selection, "vllm_prefill": vllm_prefill, "vllm_decode": vllm_decode,
    "vllm_selection": vllm_selection, "sglang_attention": sglang_attention, "sglang_store": sglang_store,
    "fireworks_prefill": fireworks_prefill, "transformers_layout": transformers_layout,
}  # fmt: skip


def test_every_snippet_has_its_test():
    assert SNIPPETS.keys() == CALLS.keys() and len(SNIPPETS) == TEXT.count("```python")


@pytest.mark.parametrize("name", CALLS)
def test_snippet(name):
    CALLS[name]()
