"""Seeded faults in the kernels' sources, for tests/mutation.py: what a kernel computes, where the faults in the PTX are of
how its threads work together (test_emulated_faults.py). mutants.py says what a fault is; here `programs` are compiled with
it, and the tests run in the emulator, with every other program as shipped.
"""

from mutants import Mutant


def kernel(fault, file, before, after, programs, *tests):
    names = tuple(f"tests/test_emulated_{test}" for test in tests)
    return Mutant(fault, f"kernel-src/{file}", before, after, names, tuple(programs.split()))


NEUTRAL = [
    kernel("store: a slot's upper half is not looked at", "neutral/store.py", "if (upper == 0) & (slot >= 0) & (slot < end):",
           "if (slot >= 0) & (slot < end):", "store_copy_sm90a",
           "store.py::test_every_byte[2-64-slot_type0-bfloat16-bfloat16-bfloat16-bfloat16]"),
    kernel("store: V is divided by the scale of K", "neutral/store.py", "scale = pick(k_scale, v_scale, Int64(0))",
           "scale = pick(k_scale, k_scale, Int64(0))", "store_bf16_e4m3_sm90a",
           "store.py::test_every_byte[5-128-slot_type1-bfloat16-float8_e4m3fn-bfloat16-bfloat16]"),
    kernel("store: a page's place in 32 bits", "neutral/store.py", "target = cache + Int64(page) * cache_page_stride",
           "target = cache + Int64(page * Int32(cache_page_stride))", "store_copy_sm90a", "far_pages.py::test_store[bf16]"),
    kernel("combine: the maximum of the first four states alone", "neutral/combine.py",
           "top[0] = ptx.maximum(top[0], self.largest(lses_here))", "top[0] = ptx.maximum(top[0], top[0])",
           "combine_f32_f32_sm90a", "combine.py::test_lses_far_apart"),
    kernel("combine: a state's place in 32 bits", "neutral/combine.py", "states + Int64(first + i) * stride, Int32",
           "states + Int64((first + i) * Int32(stride)), Int32", "combine_f32_f32_sm90a", "combine.py::test_rows_far_apart"),
    kernel("combine: what an empty state holds enters", "neutral/combine.py", "ptx.fma(weight, ptx.select(empty, Float32(0.0), x)",
           "ptx.fma(weight, x", "combine_f32_f32_sm90a", "combine.py::test_against_float64[shape1-float32-float32]"),
    kernel("combine: the LSE in units of log2", "neutral/combine.py", "m + ptx.log2(total) * LN_2", "m + ptx.log2(total)",
           "combine_bf16_bf16_sm90a", "combine.py::test_against_float64[shape2-bfloat16-bfloat16]"),
    kernel("topk: a tie goes to the higher block", "shared/select.py", "((theirs == x) & (other < lane)) if before",
           "((theirs == x) & (other > lane)) if before", "topk_narrow_sm90a", "select.py::test_ties_and_special_scores[17]"),
    kernel("topk: of equal scores a list keeps one too many", "shared/select.py", "ptx.count_bits(votes & below) < ties_left)",
           "ptx.count_bits(votes & below) <= ties_left)", "topk_narrow_sm90a", "select.py::test_ties_and_special_scores[33]"),
    kernel("topk: the oldest local block has to win by its score", "shared/select.py", "(block >= local_from) | (block < init)",
           "(block > local_from) | (block < init)", "topk_narrow_sm90a", "select.py::test_ties_and_special_scores[33]"),
    kernel("topk: a request's first token belongs to the one before", "neutral/topk.py", "count + Int32(end <= token)",
           "count + Int32(end < token)", "topk_narrow_sm90a", "select.py::test_against_float64[8-64-bfloat16-bfloat16]"),
    kernel("topk: a token's own position is no candidate", "neutral/topk.py", "kv_len - stop + token + 1, Int32(0)",
           "kv_len - stop + token, Int32(0)", "topk_narrow_sm90a", "select.py::test_against_float64[16-64-bfloat16-bfloat16]"),
    kernel("decode_score: of a bf16 query over fp8 keys the factor stays", "neutral/decode_score.py",
           "score = score * smem.load_f32(base + self.scales_at + lane * 4)", "score = score * Float32(1.0)",
           "decode_score_bf16_e4m3_n8_sm90a", "select.py::test_against_float64[8-64-bfloat16-float8_e4m3fn]"),
    kernel("decode_score: a second group of columns has its first page twice", "neutral/decode_score.py",
           "                entry = first_entry + entry_step\n                next_page",
           "                entry = first_entry\n                next_page", "decode_score_bf16_bf16_n8_sm90a",
           "select.py::test_a_request_with_more_rows_than_the_average[8-bfloat16-bfloat16]"),
    kernel("decode_score: a token sees the key behind it", "shared/index_tile.py", "visible > 2 * t + c, scores[c]",
           "visible >= 2 * t + c, scores[c]", "decode_score_bf16_bf16_n16_sm90a",
           "select.py::test_against_float64[16-64-bfloat16-bfloat16]"),
    kernel("decode_score: the factor of a tiny query leaves fp32", "shared/index_tile.py",
           "ptx.select(exponent > 126, Int32(126), exponent)", "ptx.select(exponent > 141, Int32(126), exponent)",
           "decode_score_bf16_e4m3_n8_sm90a", "select.py::test_queries_at_the_ends_of_bfloat16[e4m3--122]"),
    kernel("decode: a block ends a key early", "neutral/decode.py",
           "visible = end - (block << paging.BLOCK_BITS) - quarter * KEYS",
           "visible = end - (block << paging.BLOCK_BITS) - quarter * KEYS - 1", "decode_bf16_s2_sm90a",
           "decode.py::test_against_float64[bfloat16-bfloat16-2]"),
    kernel("decode: the LSE without its maximum", "neutral/decode.py", "softmax.natural_lse(m, total)",
           "softmax.natural_lse(Float32(0.0), total)", "decode_bf16_s1_sm90a", "decode.py::test_logits_that_grow[bfloat16-1]"),
    kernel("decode: k_scale in the place of v_scale", "neutral/decode.py", "v_scale + head64 * v_scale_head",
           "k_scale + head64 * k_scale_head", "decode_e4m3_s1_sm90a", "decode.py::test_against_float64[bfloat16-float8_e4m3fn-1]"),
    kernel("decode: the query stays as it is for a scale below zero", "shared/head_tile.py", "(words[2 * j + k] ^ turn) | spoilt",
           "words[2 * j + k] | spoilt", "decode_bf16_s1_sm90a", "decode.py::test_scale_of_any_sign[bfloat16-1--0.2]"),
    kernel("decode: with float8 keys a bf16 query keeps its factor", "shared/head_tile.py", "x = x * grow",
           "x = x * Float32(1.0)", "decode_e4m3_s4_sm90a", "decode.py::test_against_float64[bfloat16-float8_e4m3fn-4]"),
    kernel("decode: l stays where the reference grows", "shared/head_tile.py", "ptx.multiply(state[2 + half], shrink[half])",
           "ptx.multiply(state[2 + half], Float32(1.0))", "decode_bf16_s2_sm90a", "decode.py::test_logits_that_grow[bfloat16-2]"),
    kernel("decode: a chain is added without its weight", "shared/head_tile.py", "ptx.fma(O[4 * i + k], new[k >> 1], scaled[k])",
           "O[4 * i + k] + scaled[k]", "decode_bf16_s1_sm90a", "decode.py::test_logits_that_grow[bfloat16-1]"),
    kernel("decode: the factor of what is far smaller wraps around", "shared/softmax.py",
           "ptx.maximum(difference, Float32(-127.0)) + Float32(SHIFT)", "difference + Float32(SHIFT)", "decode_bf16_s4_sm90a",
           "decode.py::test_logits_far_apart[bfloat16-4-3]"),
    kernel("decode: a block with a page for its first half alone is dropped", "shared/paging.py",
           "inside & ((page_a & page_b) != -1)", "inside & (page_a != -1) & (page_b != -1)", "decode_bf16_s4_sm90a",
           "decode.py::test_against_float64[bfloat16-bfloat16-4]"),
    kernel("decode: a block named twice in a row that ascends counts twice", "shared/paging.py", "(before >= key) & inside",
           "(before > key) & inside", "decode_bf16_s4_sm90a", "decode.py::test_a_block_named_twice[4]"),
    kernel("union: a token doesn't see itself", "neutral/union.py", "used - stop + first + 1, used)",
           "used - stop + first, used)", "union_lists_sm90a", "prefill.py::test_against_float64[ragged-bfloat16-bfloat16]"),
    kernel("union: blocks of all windows are listed in each", "neutral/union.py", "window = first_block >> 11", "window = Int32(0)",
           "union_lists_sm90a", "prefill.py::test_long_page_tables[union]"),
    kernel("union: the choice counts the blocks of a tile's first four tokens", "neutral/union.py",
           "Int32((chosen & 15) != 0) + Int32((chosen >> 4) != 0)", "Int32((chosen & 15) != 0)", "union_lists_sm90a",
           "prefill.py::test_all_heads_and_tokens_decide"),
    kernel("union: the choice looks at one head", "neutral/union.py", "for head in cutlass.range(heads, unroll=1):",
           "for head in cutlass.range(1, unroll=1):", "union_choice_sm90a", "prefill.py::test_all_heads_and_tokens_decide"),
    kernel("union: the choice leaves out a request's last slot", "neutral/union.py", "(stop >> 3) + request + 1, low, slots)",
           "(stop >> 3) + request, low, slots)", "union_choice_sm90a", "prefill.py::test_a_request_of_one_tile_takes_its_formulation"),
    kernel("invert: a block that is named twice counts twice", "neutral/invert.py", "if (before & bit) == 0:",
           "if (before & bit) != bit + 1:", "invert_count_sm90a", "prefill.py::test_against_float64[ragged-bfloat16-bfloat16]"),
    kernel("invert: rows are numbered by segment first", "neutral/invert.py",
           "return (group * segments + segment) * chunk_heads + head - group * chunk_heads",
           "return segment * chunk_heads + head", "invert_scan_sm90a invert_scatter_sm90a",
           "prefill.py::test_chunks_of_tokens[bfloat16]"),
    kernel("invert: the last unit of a segment is not counted", "neutral/invert.py", "Int32(unit + i <= last_unit)",
           "Int32(unit + i < last_unit)", "invert_scan_sm90a", "prefill.py::test_chunks_of_tokens[bfloat16]"),
    kernel("invert: of a block without its first page a column is seen", "neutral/invert.py",
           "ptx.select(a < 0, Int32(64 << 8), Int32(0))", "ptx.select(a < 0, Int32(63 << 8), Int32(0))", "invert_scatter_sm90a",
           "prefill.py::test_page_numbers_outside_the_cache_contribute_nothing[64-bfloat16-bfloat16]"),
    kernel("prefill_combine: a wide row's sums so far stay where the reference grows", "neutral/prefill_combine.py",
           "ptx.multiply(acc[i], before)", "ptx.multiply(acc[i], Float32(1.0))", "prefill_combine_bf16_r16_wide_sm90a",
           "prefill.py::test_against_float64[wide-bfloat16-bfloat16]"),
    kernel("prefill_combine: a wide row takes the first head's v_scale", "neutral/prefill_combine.py",
           "Int64(head) * v_scale_head", "Int64(first_head) * v_scale_head", "prefill_combine_bf16_r16_wide_sm90a",
           "prefill.py::test_more_than_16_blocks_a_row_of_several_heads[16]"),
    kernel("prefill_combine: a row's number in the place of its head's", "shared/partials.py",
           "head = first_head + row - token * chunk_heads", "head = first_head + row", "prefill_combine_bf16_r16_sm90a",
           "prefill.py::test_chunks_change_no_bit[16-bfloat16-float8_e4m3fn]"),
]  # fmt: skip

SM90 = [
]  # fmt: skip

SM100 = [
]  # fmt: skip

ALL = NEUTRAL + SM90 + SM100
