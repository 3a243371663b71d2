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
    kernel("dense: V takes the scale of the first head", "sm90/dense.py",
           "scale_v = ptx.load_f32_or_one(v_scale + head64 * v_scale_head)", "scale_v = ptx.load_f32_or_one(v_scale)",
           "dense_bf16_m64_sm90a", "dense.py::test_against_float64[sm_90-verify-bf16]"),
    kernel("dense: the share of a split is rounded down", "shared/dense_tile.py",
           "share = ptx.divide_u32(seen + splits - 1, splits)", "share = ptx.divide_u32(seen, splits)",
           "dense_bf16_m64_sm90a", "dense.py::test_against_float64[sm_90-decode-bf16]"),
    kernel("dense: rows past 128 requests are not looked for", "shared/dense_tile.py",
           "while (missing != 0) & (base <= requests):", "while (missing != 0) & (base < requests):",
           "dense_bf16_m64_sm90a", "dense.py::test_rows_past_a_full_round_of_requests[sm_90-1]"),
    kernel("prefill: a negative scale turns what is masked", "sm90/prefill.py",
           "S[i] = ptx.select(S[i] == Float32(softmax.NEG_INF), S[i], ptx.multiply(S[i], sign))",
           "S[i] = ptx.multiply(S[i], sign)", "prefill_bf16_bf16_r16_sm90a",
           "prefill.py::test_scale_of_any_sign[-0.2-bfloat16-kv_stationary]"),
    kernel("prefill: fp16 sums of a block without room for 128 keys", "sm90/prefill.py",
           'self.lift = 7.0 if q_dtype == "f16" else 0.0', "self.lift = 0.0", "prefill_f16_f16_r16_sm90a",
           "prefill.py::test_values_near_the_largest_fp16[16-kv_stationary]"),
    kernel("prefill: the NaN of e4m3 is looked for in e5m2", "shared/prefill_loader.py",
           'ones = 0x7F if self.kv_dtype == "e4m3" else 0x7C', "ones = 0x7F", "prefill_bf16_e5m2_r16_sm90a",
           "prefill.py::test_what_is_not_finite_reaches_rows_that_see_it[64-16-bfloat16-float8_e5m2]"),
    kernel("prefill: the first row of V that not all see is not looked at", "shared/prefill_loader.py",
           "range((least + 1) * 8 + lane, (seen + 1) * 8, 32", "range((least + 2) * 8 + lane, (seen + 1) * 8, 32",
           "prefill_bf16_bf16_r16_sm90a",
           "prefill.py::test_one_value_in_the_queries_block_is_not_finite[bfloat16-261]"),
    kernel("prefill: the last row of V that is seen is not looked at", "shared/prefill_loader.py",
           "range((least + 1) * 8 + lane, (seen + 1) * 8, 32", "range((least + 1) * 8 + lane, seen * 8, 32",
           "prefill_bf16_bf16_r16_sm90a",
           "prefill.py::test_one_value_in_the_queries_block_is_not_finite[bfloat16-269]"),
    kernel("prefill: a chunk's first head is the number of its group", "shared/prefill_units.py",
           "group * chunk_heads)", "group)", "prefill_bf16_bf16_r8_sm90a",
           "prefill.py::test_chunks_change_no_bit[8-bfloat16-bfloat16]"),
    kernel("prefill: a slot without a partial has a maximum of 0", "shared/partials.py",
           "m = ptx.select(ok != 0, m, Float32(softmax.EMPTY))", "m = m + Float32(0.0)",
           "prefill_combine_bf16_r16_sm90a", "prefill.py::test_all_logits_far_below_zero[bfloat16-kv_stationary]"),
    kernel("union: a missing second half is seen", "sm90/prefill_union.py",
           "high = ptx.select((entry & (1 << 13)) != 0, ptx.minimum_i32(high, Int32(64)), high)",
           "high = ptx.minimum_i32(high, Int32(128))", "prefill_union_bf16_sm90a",
           "prefill.py::test_page_numbers_outside_the_cache_contribute_nothing[64-bfloat16-bfloat16]"),
    kernel("union: the factor of tiny queries leaves fp32", "sm90/prefill_union.py",
           "exponent = ptx.maximum_i32(ptx.f32_bits(top) >> 23, Int32(15))", "exponent = ptx.f32_bits(top) >> 23",
           "prefill_union_e4m3_sm90a", "prefill.py::test_tiny_queries_over_float8[union-float8_e4m3fn]"),
    kernel("union: a tile's rows behind its last token are written", "shared/union_tiles.py",
           "tokens = tokens & ((Int32(1) << tile_tokens) - 1)", "tokens = tokens & 255", "prefill_union_bf16_sm90a",
           "prefill.py::test_against_float64[ragged-bfloat16-bfloat16]"),
    kernel("union: a tile's rank counts the tile itself", "shared/union_tiles.py",
           "(key >= 0) & (key < own)", "(key >= 0) & (key <= own)", "prefill_union_bf16_sm90a",
           "prefill.py::test_tiles_are_given_out_once[bfloat16]"),
    kernel("widen: a page that the length ends in is left out", "sm90/prefill_widen.py",
           "((entry << page_bits) < used)", "(((entry + 1) << page_bits) <= used)", "prefill_widen_e4m3_sm90a",
           "prefill.py::test_a_cache_that_is_widened_first_changes_no_bit[ragged-bfloat16-float8_e4m3fn]"),
    kernel("widen: the place of a page in 32 bits", "sm90/prefill_widen.py",
           "k_from = k + Int64(page) * k_page", "k_from = k + Int64(page * Int32(k_page))", "prefill_widen_e4m3_sm90a",
           "far_pages.py::test_a_float8_cache_that_is_widened_first"),
    kernel("widen: a head of V by K's stride", "sm90/prefill_widen.py",
           "Int64(head) * v_head + Int64(row) * v_token", "Int64(head) * k_head + Int64(row) * v_token",
           "prefill_widen_e4m3_sm90a", "prefill.py::test_a_cache_that_is_widened_first_may_have_two_layouts"),
    kernel("prefill_score: a second row's negative scores by their bits", "sm90/prefill_score.py",
           "ptx.above_u32(ptx.maximum_u32(ptx.f32_bits(first), ptx.f32_bits(second)), 0x7F800000)",
           "ptx.above_u32(ptx.f32_bits(first), 0x7F800000)", "prefill_score_bf16_bf16_top16_sm90a",
           "prefill_score.py::test_one_of_a_threads_rows_is_below_zero[sm_90-4-second]"),
    kernel("prefill_score: local blocks are candidates too", "sm90/prefill_score.py",
           "limit = query_tiles.candidates(position + (row >> head_shift)) - local_blocks",
           "limit = query_tiles.candidates(position + (row >> head_shift))", "prefill_score_bf16_bf16_top16_sm90a",
           "prefill_score.py::test_ties_prefer_the_lower_block[sm_90]"),
    kernel("prefill_score: a second waiting block is lost", "sm90/prefill_score.py",
           "for i in cutlass.range_constexpr(2):\n                        waiting",
           "for i in cutlass.range_constexpr(1):\n                        waiting",
           "prefill_score_e4m3_e4m3_top16_sm90a",
           "prefill_score.py::test_against_float64[sm_90-128-4-float8_e4m3fn-float8_e4m3fn]"),
    kernel("prefill_score: a tie goes to the higher block", "shared/ranking.py",
           "above = [key > keys[j] for j in range(length)]", "above = [key >= keys[j] for j in range(length)]",
           "prefill_score_bf16_bf16_top16_sm90a", "prefill_score.py::test_all_blocks_are_ties[sm_90-3]"),
    kernel("prefill_fold: a tie goes to the later part", "shared/ranking.py",
           "stays = keys[j] >= other_keys[length - 1 - j]", "stays = keys[j] > other_keys[length - 1 - j]",
           "prefill_fold_top16_sm90a", "prefill_score.py::test_all_blocks_are_ties[sm_90-16]"),
    kernel("prefill_fold: the last part of a tile is left out", "shared/score_fold.py",
           "range(cta + 1, last_part + 1,", "range(cta + 1, last_part,", "prefill_fold_top16_sm90a",
           "prefill_score.py::test_tiles_of_several_ctas[sm_90-16]"),
    kernel("prefill_score: the factor of tiny queries leaves fp32", "shared/fit_fp16.py",
           "exponent = ptx.minimum_i32(Int32(141) - (largest >> 7), Int32(126))",
           "exponent = Int32(141) - (largest >> 7)", "prefill_score_bf16_e4m3_top16_sm90a",
           "prefill_score.py::test_tiny_queries_over_float8[sm_90-3]"),
    kernel("prefill_score: a request that ends with a block has a unit more", "shared/query_tiles.py",
           "last = candidates(position + rows - 1) - free_blocks", "last = candidates(position + rows) - free_blocks",
           "prefill_score_bf16_bf16_top16_sm90a prefill_fold_top16_sm90a",
           "prefill_score.py::test_requests_that_end_with_a_block[sm_90]"),
    kernel("prefill_score: rows of no request are forgotten behind 32 requests", "shared/score_loaders.py",
           "for first in cutlass.range(0, num_requests + 1, 32, unroll=1):",
           "for first in cutlass.range(0, num_requests, 32, unroll=1):", "prefill_score_bf16_bf16_top16_sm90a",
           "prefill_score.py::test_rows_past_a_full_round_of_requests[sm_90-32]"),
]  # fmt: skip

SM100 = [
]  # fmt: skip

ALL = NEUTRAL + SM90 + SM100
