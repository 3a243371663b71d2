"""Seeded faults for tests/mutation.py: one edit each, and the tests that must notice it.

`before` stands once in the file; a mutant whose text is gone is an error, so that the list follows the sources. The tests
are few: those in whose field the fault lies, so that each takes seconds. Of Python files they are pytest's names, of C++
files a test file's launch checks (launch_checks.py).
"""

from typing import NamedTuple

ATTENTION, SELECTION, CACHE = (f"tests/test_reference_{name}.py" for name in ("attention", "selection", "cache"))
OPS, BAD, DISPATCH = "tests/test_ops.py", "tests/test_bad_input.py", "tests/test_dispatch.py"
CONTIGUOUS, LAYOUT = "tests/test_contiguous.py", "tests/test_transformers_layout.py"


class Mutant(NamedTuple):
    fault: str
    file: str  # below torch-ext; of a kernel, below the root
    before: str
    after: str
    tests: tuple  # pytest's arguments, or a test file and its launch checks
    programs: tuple = ()  # of a kernel: those compiled with the fault


def python(fault, file, before, after, *tests):
    return Mutant(fault, f"m3_sparse/{file}", before, after, tests)


def cpp(fault, file, before, after, *tests):
    return Mutant(fault, file, before, after, tests)


REFERENCE = [
    python("the first block dropped", "reference.py", "(ids >= 0) & (ids < limit)", "(ids > 0) & (ids < limit)",
           f"{ATTENTION}::test_exactly_the_given_blocks_and_never_the_local_one", f"{ATTENTION}::test_sparse_ragged"),
    python("a duplicate counted twice", "reference.py", "return torch.where(repeat, blocks, ids).sort(-1).values",
           "return ids", f"{ATTENTION}::test_order_holes_and_duplicates_do_not_matter"),
    python("the tie to the higher block", "reference.py", "* blocks + (blocks - 1 - block)", "* blocks + block",
           f"{SELECTION}::test_ties_go_to_the_lower_block"),
    python("-0.0 below 0.0", "reference.py", "neginf=-INF) + 0.0).view(torch.int32)", "neginf=-INF)).view(torch.int32)",
           f"{SELECTION}::test_ties_go_to_the_lower_block", f"{SELECTION}::test_negative_zero_ties_with_zero"),
    python("a local block too few", "reference.py", "(block >= count - local)", "(block > count - local)",
           f"{SELECTION}::test_forced_blocks"),
    python("an initial block too many", "reference.py", "(block < init)", "(block <= init)",
           f"{SELECTION}::test_forced_blocks"),
    python("negative scores in reverse", "reference.py", "bits ^ 0x7FFFFFFF, bits", "bits, bits",
           f"{SELECTION}::test_negative_scores_are_ordered"),
    python("a candidate past the row's end", "reference.py", "rank.masked_fill(block >= count,",
           "rank.masked_fill(block > count,", f"{SELECTION}::test_forced_blocks",
           f"{SELECTION}::test_ordinary_data_within_epsilon"),
    python("a NaN score wins", "reference.py", "score.nan_to_num_(nan=-INF,", "score.nan_to_num_(nan=INF,",
           f"{SELECTION}::test_infinite_and_nan_scores"),
    python("the mean for the maximum of a block", "reference.py", "neginf=-INF).amax(-1)", "neginf=-INF).mean(-1)",
           f"{SELECTION}::test_scores_are_unscaled_raw_logits"),
    python("v_scale divides", "reference.py", "0, result * scale.view(-1, 1, 1))",
           "0, result / scale.view(-1, 1, 1))", f"{ATTENTION}::test_scales_of_every_accepted_shape"),
    python("k_scale ignored", "reference.py", "return query if scale is None else query * scale.view(-1, 1, 1)",
           "return query", f"{ATTENTION}::test_scales_of_every_accepted_shape"),
    python("softmax_scale ignored", "reference.py", ".unflatten(1, (heads, -1)) * softmax_scale",
           ".unflatten(1, (heads, -1)) * 128**-0.5", f"{ATTENTION}::test_softmax_scale"),
    python("the LSE in base 2", "reference.py", "(peak + norm.log()).flatten", "(peak + norm.log2()).flatten",
           f"{ATTENTION}::test_sparse_ragged"),
    python("query heads swapped between KV heads", "reference.py", "q.to(dtype).unflatten(1, (heads, -1)) *",
           "q.to(dtype).unflatten(1, (-1, heads)).transpose(1, 2) *", f"{ATTENTION}::test_head_ratios"),
    python("a store multiplies by the scale", "reference.py", "x.float() / scale.float()", "x.float() * scale.float()",
           f"{CACHE}::test_quantising_store"),
    python("a store does not saturate", "reference.py", "return x.clamp(-limit, limit).to(dtype)", "return x.to(dtype)",
           f"{CACHE}::test_quantisation_rounds_saturates_and_keeps_nan"),
    python("the slot past the cache is written", "reference.py", "(slots < pages * page)", "(slots <= pages * page)",
           f"{CACHE}::test_same_dtype_copy", f"{CACHE}::test_nothing_to_store"),
    python("slot -1 is written", "reference.py", "(slots >= 0) &", "(slots >= -1) &", f"{CACHE}::test_same_dtype_copy"),
    python("a token stored one place on", "reference.py", "slot // page, slot % page", "slot // page, (slot + 1) % page",
           f"{CACHE}::test_same_dtype_copy"),
    python("a merged empty row is 0 / 0", "reference.py", "out.copy_(acc / torch.where(norm == 0, 1, norm)",
           "out.copy_(acc / torch.where(norm == 0, norm, norm)", f"{CACHE}::test_merge_of_extreme_lses"),
    python("NaN of a state with LSE -inf merged", "reference.py",
           "acc += torch.where((lses[state] == -INF).unsqueeze(-1), 0, weight.unsqueeze(-1) * outs[state].to(dtype))",
           "acc += weight.unsqueeze(-1) * outs[state].to(dtype)", f"{OPS}::test_merge_states_rules"),
    python("a merged LSE without its offset", "reference.py", "lse.copy_(offset + norm.log())", "lse.copy_(norm.log())",
           f"{CACHE}::test_merge_states"),
    python("causal one token early", "_paging.py", "kv_len - ends[request] + row + 1, kv_len",
           "kv_len - ends[request] + row, kv_len", f"{ATTENTION}::test_sparse_ragged"),
    python("kv_len past the table", "_paging.py", "seqused_k.long().clamp(0, reach)", "seqused_k.long().clamp(min=0)",
           f"{SELECTION}::test_kv_len_is_clamped_to_the_reach_of_the_table",
           f"{ATTENTION}::test_kv_len_is_clamped_to_the_reach_of_the_table"),
    python("padding rows attend", "_paging.py", "torch.where(row < ends[-1], end, 0)", "end",
           f"{ATTENTION}::test_sparse_ragged", f"{ATTENTION}::test_rows_past_the_last_offset_when_every_request_is_empty"),
    python("the last, partial block dropped", "_paging.py", "return (end + BLOCK - 1) // BLOCK", "return end // BLOCK",
           f"{ATTENTION}::test_sparse_ragged"),
    python("the page past the cache is read", "_paging.py", "(pages >= 0) & (pages < num_pages)",
           "(pages >= 0) & (pages <= num_pages)", f"{ATTENTION}::test_page_outside_the_cache_contributes_nothing"),
    python("the last page of an odd table dropped", "_paging.py",
           "table = torch.nn.functional.pad(table, (0, parts - table.shape[1] % parts), value=-1)",
           "table = table[:, : table.shape[1] // parts * parts]", f"{SELECTION}::test_odd_number_of_64_token_pages"),
    python("a request's first row given to the one before", "_paging.py", "row, right=True).clamp_(max=seqused",
           "row, right=False).clamp_(max=seqused", f"{ATTENTION}::test_sparse_ragged"),
    python("a token past the end is visible", "_paging.py", "* BLOCK + token < end.unsqueeze(-1)",
           "* BLOCK + token <= end.unsqueeze(-1)", f"{ATTENTION}::test_sparse_ragged"),
    python("the online sum is not rescaled", "_rows.py", "norm = norm * fade + weight.sum(-1)",
           "norm = norm + weight.sum(-1)", f"{ATTENTION}::test_long_context"),
    python("the online accumulator is not rescaled", "_rows.py", "torch.baddbmm(acc * fade.unsqueeze(-1),",
           "torch.baddbmm(acc,", f"{ATTENTION}::test_long_context"),
    python("regrouped: the partly visible block taken as whole", "_grouped.py", "edge = (rows.end // BLOCK)",
           "edge = (rows.end // BLOCK + 1)", f"{OPS}::test_regrouping_changes_nothing"),
    python("regrouped: a broken value reaches every row", "_grouped.py",
           "_masked_product(weight, value, seen, group)\n        part", "torch.bmm(weight, value)\n        part",
           f"{OPS}::test_a_broken_value_stays_with_the_rows_that_see_it"),
    python("regrouped: a joined sum without its weight", "_grouped.py", "(fade * self.norm[place]).sum(1)",
           "self.norm[place].sum(1)", f"{OPS}::test_regrouping_changes_nothing"),
    python("gradient without the softmax's correction", "_backward.py",
           "change = change - (weight * change).sum(-1, keepdim=True)", "change = change * 1",
           f"{ATTENTION}::test_gradients_are_those_of_the_oracle"),
    python("a shared page keeps one row's gradient", "_backward.py",
           "grad_v.index_put_(index, (weight.mT @ upstream).view(shape), accumulate=True)",
           "grad_v.index_put_(index, (weight.mT @ upstream).view(shape), accumulate=False)",
           f"{ATTENTION}::test_gradients_are_those_of_the_oracle"),
    python("gradient of q without softmax_scale", "_backward.py", "grad = grad * softmax_scale", "grad = grad * 1",
           f"{ATTENTION}::test_gradients_are_those_of_the_oracle"),
]  # fmt: skip

RULES = [
    python("left padding ignored", "_contiguous.py", "return Rows(first + pad, length,", "return Rows(first, length,",
           f"{CONTIGUOUS}::test_attention"),
    python("a length past its row, behind padding", "_contiguous.py", "used.clamp(max=length - pad)",
           "used.clamp(max=length)", f"{CONTIGUOUS}::test_a_wrong_length_stays_within_its_row",
           f"{CONTIGUOUS}::test_attention"),
    python("a run too few in the table of a contiguous cache", "_contiguous.py", "torch.arange(0, self.length, run,",
           "torch.arange(0, self.length - 1, run,", f"{CONTIGUOUS}::test_attention"),
    python("indices wrap at 2^32", "_limits.py", "return x.clamp(-(2**31), 2**31 - 1).to(torch.int32).contiguous()",
           "return x.to(torch.int32).contiguous()", f"{DISPATCH}::test_indices_saturate_at_int32"),
    python("33 blocks a row go to kernels made for 32", "_limits.py", "MOST_IDS = 32", "MOST_IDS = 33",
           f"{DISPATCH}::test_shapes_outside_the_kernels"),
    python("a gradient asked of kernels without one", "capability.py", "aot = not needs_grad and outside_aot",
           "aot = outside_aot", f"{DISPATCH}::test_choice_on_a_gpu"),
    python("forced blocks beyond topk accepted", "checks.py", "if local_blocks + init_blocks > topk:",
           "if local_blocks + init_blocks > topk + 1:", f"{BAD}::test_refused"),
    python("heads that no KV head divides accepted", "checks.py", "if q.shape[1] % heads != 0:",
           "if q.shape[1] < heads:", f"{BAD}::test_refused"),
    python("an lse of any float dtype accepted", "checks.py", '"[T, Hq]", tuple(q.shape[:2]), (torch.float32,), q)',
           '"[T, Hq]", tuple(q.shape[:2]), FLOATS, q)', f"{BAD}::test_refused"),
    python("strides of 8 bytes accepted", "_arguments.py", "strides[dim] * size % 16 != 0", "strides[dim] * size % 8 != 0",
           f"{BAD}::test_every_row_begins_at_16_bytes"),
    python("a base at 8 bytes accepted", "_arguments.py",
           "is_compiling() and x.storage_offset() * size % 16 != 0", "is_compiling() and x.storage_offset() * size % 8 != 0",
           f"{BAD}::test_every_row_begins_at_16_bytes"),
    python("a row without tokens begins at 0", "_transformers_rows.py", "first = torch.where(count > 0, real.argmax(-1), width)",
           "first = torch.where(count > 0, real.argmax(-1), 0)", f"{LAYOUT}::test_content_range"),
    python("padding counted as keys", "_transformers_rows.py", "lengths = (lengths - self.pad).clamp(min=0)",
           "lengths = lengths.clamp(min=0)", LAYOUT),
    python("a mask with holes passes", "_transformers_rows.py", "(count > 0) & (count != end - first)",
           "(count > 0) & (count > end - first)", f"{LAYOUT}::test_content_range"),
]  # fmt: skip

LAUNCHER = [
    cpp("decode: K's page stride for V", "launch/decode.cpp", "a.v_cache.stride(0) * kv_size", "a.k_cache.stride(0) * kv_size",
        "test_decode.py", "packs_every_parameter", "strides_beyond_32_bits_survive"),
    cpp("decode: 16 CTAs a row one row too long", "launch/decode.cpp", "18 * rows <= multiprocessors",
        "16 * rows <= multiprocessors", "test_decode.py", "chooses_the_splits_by_shape"),
    cpp("decode: KV heads for heads a KV head", "launch/decode.cpp", "static_cast<I32>(a.q.size(1) / heads)",
        "static_cast<I32>(heads)", "test_decode.py", "packs_every_parameter"),
    cpp("decode: a stride in 32 bits", "launch/decode.cpp", "a.k_cache.stride(0) * kv_size,",
        "static_cast<I32>(a.k_cache.stride(0) * kv_size),", "test_decode.py", "strides_beyond_32_bits_survive"),
    cpp("dense: the tile of the rows past the last", "launch/dense.cpp", "(requests + 1) * (tile_tokens - 1)",
        "requests * (tile_tokens - 1)", "test_dense.py", "packs_every_parameter", "chooses_the_plan_by_shape"),
    cpp("dense: pages of 64 taken for 128", "launch/dense.cpp", "page == kKeys ? 0 : 1", "page == kKeys ? 0 : 0",
        "test_dense.py", "packs_every_parameter"),
    cpp("store: a slot too many", "launch/store.cpp", "narrow(k_cache.size(0) * page)", "narrow(k_cache.size(0) * page + 1)",
        "test_store.py", "packs_every_parameter"),
    cpp("store: the last tokens without a CTA", "launch/store.cpp", "(tokens + kTokens - 1) / kTokens", "tokens / kTokens",
        "test_store.py", "packs_every_parameter", "takes_slots_of_32_bits_and_no_index"),
    cpp("topk: the narrow program one block early", "launch/topk.cpp", "if (blocks <= kNarrowBlocks)",
        "if (blocks < kNarrowBlocks)", "test_select.py", "lays_the_work_out_by_shape", "packs_every_parameter"),
    cpp("combine: the LSEs' stride of states", "launch/combine.cpp", "lses.stride(0) * 4", "lses.stride(1) * 4",
        "test_combine.py", "packs_every_parameter"),
    cpp("tensor map: the small tensor's bit stays", "launch/tensor_map.cpp", "span < kSmall", "span > kSmall",
        "test_prefill.py", "small_tensors_lose_a_mark_on_blackwell"),
    cpp("launcher: an error of cuCtxPopCurrent ignored", "launch/launch.cpp",
        'check(driver().CtxPopCurrent(&context), "cuCtxPopCurrent");', "driver().CtxPopCurrent(&context);",
        "test_driver_errors.py", "every_failure_names_the_call"),
    cpp("launcher: an error of cuCtxGetDevice ignored", "launch/launch.cpp",
        'if (result != CUDA_ERROR_INVALID_CONTEXT) check(result, "cuCtxGetDevice");', "", "test_driver_errors.py",
        "every_failure_names_the_call"),
    cpp("checks: any length of cu_seqlens_q", "torch_binding.cpp",
        "is_vector(a.cu_seqlens_q, ScalarType::Int) && a.cu_seqlens_q.size(0) == b + 1",
        "is_vector(a.cu_seqlens_q, ScalarType::Int) && a.cu_seqlens_q.size(0) >= b", "test_dense.py",
        "refuses_what_would_leave_a_tensor"),
    cpp("checks: 17 query heads a KV head", "torch_binding.cpp", "hq / hkv <= 16", "hq / hkv <= 17", "test_dense.py",
        "refuses_what_would_leave_a_tensor"),
    cpp("checks: slots of another length than k", "torch_binding.cpp",
        "slot_mapping.dim() == 1 && slot_mapping.size(0) == k.size(0)", "slot_mapping.dim() == 1", "test_store.py",
        "refuses_what_would_leave_a_tensor"),
]  # fmt: skip

PYTHON = REFERENCE + RULES
ALL = PYTHON + LAUNCHER
# A few that are quick: what `make test` runs.
SMOKE = (
    "the first block dropped",
    "slot -1 is written",
    "33 blocks a row go to kernels made for 32",
)
