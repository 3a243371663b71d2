"""What a CTA of the dense attention kernels works on, in the forms in which flash-attention-4's loops ask for it.

They take a tile scheduler (OneTile), the key blocks to walk (Blocks) and a mask (Mask of SM90), and hand what they were given
for sequence lengths on to the epilogue (Output). DenseTiles is what the kernels of all architectures do alike.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

import shared.flash_attention  # noqa: F401, I001  before flash_attn and quack
from flash_attn.cute.mask import mask_r2p_lambda, r2p_bitmask_below, sm90_col_to_r2p_idx
from flash_attn.cute.tile_scheduler import WorkTileInfo
from quack import layout_utils

from shared import ptx, smem, softmax, tma

NEGATE = -0x7FFF8000  # both sign bits of a pair of 16-bit floats
KEYS = 128  # of a block
PER_LANE = 4  # requests that a lane looks at in a round of the search
HALF = KEYS * 128  # bytes of 64 columns of a key tile
SLAB = 2 * HALF


@dataclass(frozen=True)
class Tile:
    """What a CTA works on. All values are the same in all its threads."""

    request: Int32  # may be the number of requests: rows past the last one
    first_row: Int32  # of the request, among all tokens
    first_token: Int32  # of the tile, within the request
    tokens: Int32  # of the tile; at most 0: there is no such tile
    kv_len: Int32
    shift: Int32  # a token's visible end without clamping: token + 1 + shift
    block_min: Int32  # key blocks [block_min, block_max)
    block_max: Int32
    head: Int32  # KV head

    def end_of(self, token, causal):
        """How many keys a token of the request sees."""
        end = ptx.clamp(self.shift + token + 1, Int32(0), self.kv_len)
        return ptx.select(causal != 0, end, self.kv_len)


def logit_scale(scale):
    """|scale| as a factor from scores to log2 units, and what becomes of the query: 0 for nothing, 1 if it is negated, -1 if
    it becomes NaN. The factor is neither 0 nor infinite: times the -inf and 0 that stand for the maximum of a row that sees
    nothing, both are NaN.
    """
    scale = softmax.finite_or_nan(scale * softmax.LOG2_E)
    change = ptx.select(scale >= Float32(0.0), Int32(0), ptx.select(scale < Float32(0.0), Int32(1), Int32(-1)))
    return ptx.maximum(ptx.absolute(scale), Float32(softmax.SMALLEST)), change


def changed(words, change):
    """Words of a query for which `change` is not 0."""
    fill = ptx.select(change < 0, Int32(softmax.NAN_PAIR), Int32(0))
    return [(w ^ Int32(NEGATE)) | fill for w in words]


class OneTile:
    """The tile scheduler that flash-attention-4's loops ask: one tile a CTA, or none."""

    def __init__(self, exists):
        self.exists = exists

    def initial_work_tile_info(self):
        return self._info(self.exists)

    def get_current_work(self):
        return self._info(Boolean(False))

    def advance_to_next_work(self):
        return self._info(Boolean(False))

    @staticmethod
    def _info(exists):
        return WorkTileInfo((Int32(0), Int32(0), Int32(0), Int32(0)), exists)

    def __extract_mlir_values__(self):
        return [self.exists.ir_value()]

    def __new_from_mlir_values__(self, values):
        return OneTile(Boolean(values[0]))


@dataclass(frozen=True)
class Blocks:
    """Which key blocks flash-attention-4's loops walk, downwards, and from where on without a mask."""

    tile: Tile
    unmasked_end: Int32
    window_size_left: None = None

    def get_n_block_min_max(self, seqlen, m_block, **unused):
        return self.tile.block_min, self.tile.block_max

    def get_n_block_min_causal_local_mask(self, seqlen, m_block, n_block_min):
        return self.unmasked_end

    def get_n_block_min_before_local_mask(self, seqlen, m_block, n_block_min):
        return n_block_min


@dataclass(frozen=True)
class Paging:
    """A request's row of the page table."""

    row: Int64
    width: Int32
    pages: Int32  # that the cache has
    shift: Int32  # log2 of the pages a block has

    def is_missing(self, n_block, part):
        """Whether one of the pages of a block is none of the cache's."""
        entry = (n_block << self.shift) + (self.shift & part)
        page = ptx.load_i32_if(self.row + Int64(entry) * 4, Int32(entry < self.width), -1)
        return (page < 0) | (page >= self.pages)


@dataclass(frozen=True)
class Mask:
    """The mask of one thread's two rows."""

    ends: tuple  # the rows' visible ends, less the thread's first column
    bad_pages: Int32  # of the tile: 0 if all are the cache's
    paging: Paging

    @cute.jit
    def apply_mask(self, acc_S, n_block, **unused):
        scores = layout_utils.reshape_acc_to_mn(acc_S)
        for r in cutlass.range_constexpr(2):
            limit = ptx.clamp(self.ends[r] - n_block * KEYS, Int32(0), Int32(KEYS))
            limit = sm90_col_to_r2p_idx(limit)
            mask_r2p_lambda(scores[r, None], lambda s, limit=limit: r2p_bitmask_below(limit, s), rank1=True)
        if self.bad_pages != 0:
            for part in cutlass.range_constexpr(2):
                if self.paging.is_missing(n_block, part):
                    for r in cutlass.range_constexpr(2):
                        for c in cutlass.range_constexpr(16):
                            scores[r, 16 * part + c] = -Float32.inf


@dataclass(frozen=True)
class Output:
    """Where the rows of a tile go. Addresses are those of the tile's first row."""

    out: Int64
    lse: Int64  # 0: not wanted
    out_token: Int64
    out_head: Int64
    lse_token: Int64
    lse_head: Int64
    group: Int32
    rows: Int32  # that exist
    splits: Int32
    v_scale: Float32

    def address(self, row):
        token = row // self.group
        head, token = Int64(row - token * self.group), Int64(token)
        out = self.out + token * self.out_token + head * self.out_head
        return out, self.lse + token * self.lse_token + head * self.lse_head


def row_of(thread, r):
    """The tile's row that a consumer thread holds as its first (r = 0) or second one."""
    return (thread >> 5) * 16 + ((thread & 31) >> 2) + 8 * r


class DenseTiles:
    """For a kernel class: its tile, the copies of keys, and rows that see nothing, which `epilogue_threads` threads fill."""

    @cute.jit
    def find_tile(
        self,
        index: Int32,
        lane: Int32,
        cu_seqlens: Int64,
        seqused: Int64,
        tokens: Int32,
        requests: Int32,
        reach: Int32,
        tile_tokens: Int32,
    ):
        """(request, first row, rows, tile of the request, kv_len) by the whole warp; rows 0: there is no such tile.

        A round takes 4 requests a lane, all loads at once: the latency of one access for 128 requests.
        """
        request, first, length, block, used = requests + 1, Int32(0), Int32(0), Int32(0), Int32(0)
        base, before, missing = Int32(0), Int32(0), Int32(1)
        while (missing != 0) & (base <= requests):
            r = base + lane * PER_LANE
            offsets = [
                (cu_seqlens + Int64(r + i) * 4, Int32(r + i <= requests), 2147483647) for i in range(PER_LANE + 1)
            ]
            lengths = [(seqused + Int64(r + i) * 4, Int32(r + i < requests), 0) for i in range(PER_LANE)]
            loaded = ptx.load_i32_batch(offsets + lengths)
            starts = [ptx.clamp(x, Int32(0), tokens) for x in loaded[: PER_LANE + 1]]
            sizes = [ptx.maximum_i32(starts[i + 1] - starts[i], Int32(0)) for i in range(PER_LANE)]
            tiles = [ptx.divide_u32(x + tile_tokens - 1, tile_tokens) for x in sizes]
            upto = ptx.warp_prefix_sum(tiles[0] + tiles[1] + tiles[2] + tiles[3], lane)
            hits = ptx.ballot(Int32(before + upto > index))
            if hits != 0:
                hit = ptx.lowest_bit(hits)
                # Of the lane's own requests; the last tile of a request, the longest with a causal mask, goes first.
                end = before + upto
                here = [Int32(0)] * 5
                for i in cutlass.range_constexpr(PER_LANE - 1, -1, -1):
                    found = index < end
                    what = [r + i, starts[i], sizes[i], end - 1 - index, loaded[PER_LANE + 1 + i]]
                    here = [ptx.select(found, x, y) for x, y in zip(what, here)]
                    end = end - tiles[i]
                request, first, length, block, used = [ptx.shuffle(x, hit) for x in here]
                block = ptx.maximum_i32(block, Int32(0))
                missing = Int32(0)
            before, base = before + ptx.shuffle(upto, 31), base + 32 * PER_LANE
        return request, first, length, block, ptx.clamp(used, Int32(0), reach)

    def tile_of(self, found, head, split, tile_tokens, causal, splits):
        """The Tile that `find_tile` found, of a KV head and a split."""
        request, first_row, length, block, kv_len = found
        first_token = block * tile_tokens
        tile_count = ptx.minimum_i32(length - first_token, tile_tokens)
        shift = kv_len - length
        last_end = ptx.clamp(shift + first_token + tile_count, Int32(0), kv_len)
        seen = (ptx.select(causal != 0, last_end, kv_len) + KEYS - 1) // KEYS
        seen = ptx.select(tile_count > 0, seen, Int32(0))
        share = ptx.divide_u32(seen + splits - 1, splits)
        block_min = split * share
        block_max = ptx.minimum_i32(block_min + share, seen)
        return Tile(request, first_row, first_token, tile_count, kv_len, shift, block_min, block_max, head)

    @cute.jit
    def copy_keys(self, target: Int32, address: Int64, page_shift: Int32, pages, head: Int32, mbarrier: Int32):
        """A key tile: one box of 128 tokens or two of 64, for each half of the columns. By one thread."""
        smem.mbarrier_expect(mbarrier, Int32(SLAB))
        for half in cutlass.range_constexpr(2):
            at = target + half * HALF
            tma.tma_load(at, address, [Int32(64 * half), Int32(0), head, pages[0]], mbarrier)
            if page_shift != 0:
                tma.tma_load(at + HALF // 2, address, [Int32(64 * half), Int32(0), head, pages[1]], mbarrier)

    @cute.jit
    def any_bad_page(self, tile: Tile, lane: Int32, paging: Paging):
        """Whether one of the tile's page numbers is none of the cache's; by the whole warp."""
        end = ptx.minimum_i32(tile.block_max << paging.shift, paging.width)
        bad = Int32(0)
        for start in cutlass.range((tile.block_min << paging.shift) + lane, end + lane, 128, unroll=1):
            for i in cutlass.range_constexpr(4):
                e = start + 32 * i
                page = ptx.load_i32_if(paging.row + Int64(e) * 4, Int32(e < end), 0)
                bad = bad | Int32((page < 0) | (page >= paging.pages))
        return ptx.ballot(bad)

    @cute.jit
    def fill_empty(self, output, thread: Int32):
        """Rows that see nothing: output 0 and LSE -inf. In a split too: the merge loads them before it has the LSE."""
        for row in cutlass.range(thread >> 4, output.rows, self.epilogue_threads // 16, unroll=1):
            out, lse_at = output.address(row)
            ptx.store_words(out + Int64((thread & 15) * 16), [Int32(0)] * 4)
            if output.splits > 1:  # fp32: twice the bytes
                ptx.store_words(out + Int64(256 + (thread & 15) * 16), [Int32(0)] * 4)
            if ((thread & 15) == 0) & (output.lse != 0):
                ptx.store_f32(lse_at, -Float32.inf)
