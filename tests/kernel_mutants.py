"""Seeded faults in the kernels' sources, for tests/mutation.py: what a kernel computes, where the faults in the PTX are of
how its threads work together (test_emulated_faults.py). mutants.py says what a fault is; here `programs` are compiled with
it, and the tests run in the emulator, with every other program as shipped.
"""

from mutants import Mutant


def kernel(fault, file, before, after, programs, *tests):
    names = tuple(f"tests/test_emulated_{test}" for test in tests)
    return Mutant(fault, f"kernel-src/{file}", before, after, names, tuple(programs.split()))


NEUTRAL = [
    kernel("decode: the last quarter of a block ends a key early", "neutral/decode.py",
           "visible = end - (block << paging.BLOCK_BITS) - quarter * KEYS",
           "visible = end - (block << paging.BLOCK_BITS) - quarter * KEYS - 1", "decode_bf16_s2_sm90a",
           "decode.py::test_against_float64[bfloat16-bfloat16-2]"),
    kernel("decode: the LSE without its maximum", "neutral/decode.py", "softmax.natural_lse(m, total)",
           "softmax.natural_lse(Float32(0.0), total)", "decode_bf16_s1_sm90a", "decode.py::test_against_float64[bfloat16-bfloat16-1]"),
]  # fmt: skip

SM90 = [
]  # fmt: skip

SM100 = [
    kernel("dense: the walk is masked from the tile's last token on", "sm100/dense.py",
           "tile.end_of(tile.first_token, causal) // KEYS", "tile.end_of(tile.first_token + tile.tokens - 1, causal) // KEYS",
           "dense_bf16_m256_sm100a", "dense.py::test_against_float64[sm_100-mha-bf16]"),
    kernel("dense: a stage's rows beyond its whole tokens are written too", "sm100/dense.py",
           "rows = (ROWS // output.group) * output.group", "rows = ROWS", "dense_bf16_m256_sm100a",
           "dense.py::test_against_float64[sm_100-group of 5-bf16]"),
    kernel("dense: k_scale for v_scale", "sm100/dense.py", "ptx.load_f32_or_one(v_scale + head64 * v_scale_head)",
           "ptx.load_f32_or_one(k_scale + head64 * k_scale_head)", "dense_f16_m128_sm100a",
           "dense.py::test_against_float64[sm_100-verify-fp16]"),
    kernel("dense: the first row of V behind the end is left", "sm100/dense.py", "tail * 8 + lane, KEYS * 8",
           "(tail + 1) * 8 + lane, KEYS * 8", "dense_bf16_m128_sm100a",
           "dense.py::test_against_float64[sm_100-verify-bf16]"),
    kernel("dense: only the first page of a block can be missing", "sm100/dense.py",
           "for part in cutlass.range_constexpr(2)", "for part in cutlass.range_constexpr(1)",
           "dense_f16_m128_sm100a", "dense.py::test_page_numbers_outside_the_cache_contribute_nothing[sm_100-64-fp16]"),
    kernel("dense: an empty row has the scale of V", "sm100/dense.py",
           "ptx.select(total == Float32(0.0), Float32(0.0), scale * output.v_scale)", "scale * output.v_scale",
           "dense_f16_m128_sm100a dense_f16_m256_sm100a",
           "property_cases.py::test_what_is_not_finite_stays_visible[(torch.float16, torch.float16)-dense-sm_100]"),
    kernel("prefill: a tile's KV head is no part of where its results go", "sm100/prefill.py",
           "token_slots + (flags >> 8) * width + (entry & 31)", "token_slots + (entry & 31)",
           "prefill_f16_f16_r16_sm100a", "prefill_sm100.py::test_against_float64[overlapping-1]"),
    kernel("prefill: the row's place in a token of 8 heads as of 16", "sm100/prefill.py", "Int64(row & (self.rows - 1))",
           "Int64(row & 15)", "prefill_f16_f16_r8_sm100a", "prefill_sm100.py::test_against_float64[group of 8-1]"),
    kernel("prefill: a negative scale turns what is masked", "sm100/prefill.py",
           "ptx.select(S[i] == Float32(softmax.NEG_INF), S[i], ptx.multiply(S[i], sign))", "ptx.multiply(S[i], sign)",
           "prefill_bf16_bf16_r16_sm100a", "prefill_sm100.py::test_scale_of_any_sign[-0.2-group16-sm_100]"),
    kernel("prefill: a missing first page is not hidden", "sm100/prefill.py", "(i <= limit) & (i >= hidden)", "i <= limit",
           "prefill_bf16_bf16_r16_sm100a",
           "prefill_sm100.py::test_page_numbers_outside_the_cache_contribute_nothing[64-sm_100]"),
    kernel("prefill: a row that sees no key of a block", "sm100/prefill.py",
           "ptx.maximum(ptx.multiply(blackwell.row_maximum(logits), scale), Float32(softmax.EMPTY))",
           "ptx.multiply(blackwell.row_maximum(logits), scale)", "prefill_bf16_bf16_r16_sm100a",
           "prefill_sm100.py::test_page_numbers_outside_the_cache_contribute_nothing[64-sm_100]"),
    kernel("prefill: sums of p v in fp16 without room", "sm100/prefill.py", '7.0 if q_dtype == "f16" else 0.0', "0.0",
           "prefill_f16_f16_r16_sm100a", "prefill_sm100.py::test_against_float64[large-1]"),
    kernel("prefill: Q from the first heads, whatever the chunk", "sm100/prefill.py", "head = first_head + (flags >> 8)",
           "head = flags >> 8", "prefill_bf16_bf16_r16_sm100a",
           "prefill_sm100.py::test_runs_chunks_and_multiprocessors_change_no_bit[bfloat16-bfloat16]"),
    kernel("prefill_union: a tile's first token says what all see", "sm100/prefill_union.py",
           "smem.load_i32(record + 4 * END) + token", "smem.load_i32(record + 4 * END)", "prefill_union_bf16_sm100a",
           "prefill_union_sm100.py::test_against_float64[ragged-bfloat16-bfloat16]"),
    kernel("prefill_union: a block that one of two tokens chose counts for both", "sm100/prefill_union.py",
           "if ((entry & EDGE_BITS) != 0) | (pair != 3):", "if (entry & EDGE_BITS) != 0:", "prefill_union_f16_sm100a",
           "prefill_union_sm100.py::test_against_float64[sharp-float16-float16]"),
    kernel("prefill_union: the sum keeps an old reference", "sm100/prefill_union.py", "ptx.fma(state[1], factor, total[0] + total[1])",
           "state[1] + (total[0] + total[1])", "prefill_union_bf16_sm100a",
           "prefill_union_sm100.py::test_references_that_move[sm_100]"),
    kernel("prefill_union: the NaN of a warp's second token is the first's", "sm100/prefill_union.py",
           "(votes >> (lane & 16)) & 0xFFFF", "votes & 0xFFFF", "prefill_union_bf16_sm100a",
           "prefill_union_sm100.py::test_what_is_not_finite_reaches_rows_that_see_it[64-sm_100]"),
    kernel("prefill_union: what a bf16 query was divided by is forgotten", "sm100/prefill_union.py",
           "ptx.maximum(state[2] * grow,", "ptx.maximum(state[2],", "prefill_union_e4m3_sm100a",
           "prefill_union_sm100.py::test_against_float64[ragged-bfloat16-float8_e4m3fn]"),
    kernel("prefill_union: k_scale for v_scale", "sm100/prefill_union.py", "smem.load_f32(record + 4 * V_SCALE)",
           "smem.load_f32(record + 4 * SCALE)", "prefill_union_e4m3_sm100a",
           "prefill_union_sm100.py::test_against_float64[full-bfloat16-float8_e4m3fn]"),
    kernel("prefill_union: a tile writes 8 tokens, whatever its request has", "sm100/prefill_union.py",
           "here = (tokens >> token) & 1", "here = Int32(1)", "prefill_union_bf16_sm100a",
           "prefill_union_sm100.py::test_against_float64[ragged-bfloat16-bfloat16]"),
    kernel("prefill_score: a row's own block is seen whole", "sm100/prefill_score.py", "(position + 1) >> 7",
           "(position + 128) >> 7", "prefill_score_bf16_bf16_top16_sm100a",
           "prefill_score.py::test_masked_blocks[sm_100-3-bfloat16-bfloat16]"),
    kernel("prefill_score: a block's second page is there if the first is", "sm100/prefill_score.py",
           "(flags & (1 + start // 64)) != 0", "(flags & 1) != 0", "prefill_score_bf16_bf16_scores_sm100a",
           "prefill_score.py::test_pages_outside_the_cache_contribute_nothing[sm_100]"),
    kernel("prefill_score: one local block too few", "sm100/prefill_score.py",
           "query_tiles.candidates(position + token) - local_blocks", "query_tiles.candidates(position + token) - local_blocks + 1",
           "prefill_score_bf16_bf16_top16_sm100a", "prefill_score.py::test_ties_prefer_the_lower_block[sm_100]"),
    kernel("prefill_score: what bf16 queries were divided by is forgotten", "sm100/prefill_score.py", "value[0] * undo if",
           "value[0] if", "prefill_score_bf16_e4m3_scores_sm100a",
           "prefill_score.py::test_scores_below_zero_and_nan[sm_100-4-bfloat16-float8_e4m3fn]"),
    kernel("prefill_score: a NaN is stored", "sm100/prefill_score.py", "ptx.canonical(score)", "score",
           "prefill_score_bf16_bf16_scores_sm100a",
           "prefill_score.py::test_scores_below_zero_and_nan[sm_100-4-bfloat16-bfloat16]"),
    kernel("blackwell: a NaN is the maximum of three", "shared/blackwell.py", "max.f32 $0, $1, $2, $3;",
           "max.NaN.f32 $0, $1, $2, $3;", "prefill_score_bf16_bf16_scores_sm100a prefill_score_bf16_bf16_top16_sm100a",
           "prefill_score.py::test_scores_below_zero_and_nan[sm_100-4-bfloat16-bfloat16]"),
    kernel("blackwell: 2 to the power of a NaN", "shared/blackwell.py", "max.NaN.f32 $0, $1, $2;", "max.f32 $0, $1, $2;",
           "prefill_bf16_bf16_r16_sm100a",
           "prefill_sm100.py::test_what_is_not_finite_reaches_rows_that_see_it[bfloat16-bfloat16-sm_100]"),
    kernel("blackwell: 2 to the power of minus infinity is 2^-126", "shared/blackwell.py", "Float32(-127.0)", "Float32(-126.0)",
           "prefill_union_bf16_sm100a", "prefill_union_sm100.py::test_against_float64[ragged-bfloat16-bfloat16]"),
    kernel("blackwell: the last four columns are no part of a row's maximum", "shared/blackwell.py",
           "chains = [ptx.maximum(a, b) for a, b in zip(chains, rest[8 * steps :])]", "",
           "prefill_f16_f16_r16_sm100a", "prefill_sm100.py::test_against_float64[sharp-1]"),
]  # fmt: skip

ALL = NEUTRAL + SM90 + SM100
