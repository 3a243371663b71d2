"""What a CTA of sm90/dense.py works on, in the forms in which flash-attention-4's consumer loop asks for it.

FlashAttentionForwardSm90.mma takes a tile scheduler (OneTile), the key blocks to walk (Blocks) and a mask (Mask), and hands
what it was given for sequence lengths on to the epilogue (Output).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

import shared.flash_attention  # noqa: F401, I001  before flash_attn and quack
from flash_attn.cute.mask import mask_r2p_lambda, r2p_bitmask_below, sm90_col_to_r2p_idx
from flash_attn.cute.tile_scheduler import WorkTileInfo
from quack import layout_utils

from shared import ptx

KEYS = 128  # of a block


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


class OneTile:
    """The tile scheduler that FlashAttentionForwardSm90.mma asks: one tile a CTA, or none."""

    def __init__(self, exists):
        self.exists = exists

    def initial_work_tile_info(self):
        return self._info(self.exists)

    def get_current_work(self):
        return self._info(Boolean(False))

    def advance_to_next_work(self):
        pass

    @staticmethod
    def _info(exists):
        return WorkTileInfo((Int32(0), Int32(0), Int32(0), Int32(0)), exists)

    def __extract_mlir_values__(self):
        return [self.exists.ir_value()]

    def __new_from_mlir_values__(self, values):
        return OneTile(Boolean(values[0]))


@dataclass(frozen=True)
class Blocks:
    """Which key blocks FlashAttentionForwardSm90.mma walks, downwards, and from where on without a mask."""

    tile: Tile
    unmasked_end: Int32
    window_size_left: None = None

    def get_n_block_min_max(self, seqlen, m_block):
        return self.tile.block_min, self.tile.block_max

    def get_n_block_min_causal_local_mask(self, seqlen, m_block, n_block_min):
        return self.unmasked_end

    def get_n_block_min_before_local_mask(self, seqlen, m_block, n_block_min):
        return n_block_min


@dataclass(frozen=True)
class Mask:
    """The mask of one thread's two rows."""

    ends: tuple  # the rows' visible ends, less the thread's first column
    bad_pages: Int32
    page_row: Int64
    page_width: Int32
    pages: Int32
    page_shift: Int32  # log2 of the pages a block has

    @cute.jit
    def apply_mask(self, acc_S, n_block, **unused):
        scores = layout_utils.reshape_acc_to_mn(acc_S)
        for r in cutlass.range_constexpr(2):
            limit = ptx.clamp(self.ends[r] - n_block * KEYS, Int32(0), Int32(KEYS))
            limit = sm90_col_to_r2p_idx(limit)
            mask_r2p_lambda(scores[r, None], lambda s, limit=limit: r2p_bitmask_below(limit, s), rank1=True)
        if self.bad_pages != 0:
            for part in cutlass.range_constexpr(2):
                entry = (n_block << self.page_shift) + (self.page_shift & part)
                page = ptx.load_i32_if(self.page_row + Int64(entry) * 4, Int32(entry < self.page_width), -1)
                if (page < 0) | (page >= self.pages):
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


def transpose_quad(words, t):
    """Four lanes with four words each: word i of lane t becomes word t of lane i."""
    words = list(words)
    for distance in (1, 2):
        low = (t & distance) == 0
        for a in [i for i in range(4) if not i & distance]:
            b = a + distance
            sent = ptx.select(low, words[b], words[a])
            came = ptx.shuffle_xor(sent, distance)
            words[a], words[b] = ptx.select(low, words[a], came), ptx.select(low, came, words[b])
    return words
