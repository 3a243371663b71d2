"""Units of work of sm90/prefill.py: parts of chunks, shared out among the CTAs of one launch.

Products and combinations are units of their own, as many a chunk as CTAs, given out in order by counters in global memory
(shared/progress.py), and follow each other by counters of what is done. `counters` holds four int32 a chunk, of which the
first two serve the launch that begins with it:
    products given out, combinations given out, products done (by warp), combinations done
A combination waits for all products of its chunk; products wait for the combination PLACES chunks before, whose place they
write. Both are units given out earlier, so CTAs need not all run at a time. invert.py sets the counters to 0, or to a number
past all units where no sequence takes part: then a launch ends at once.

Warp 0 takes units of products and publishes their chunk's number in shared memory (-1: the end), two in turn, for the
consumers, who see by a tile with END where a unit ends.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64

from shared import hopper, progress, ptx, smem
from shared.partials import BARRIER, THREADS, Chunk, Output, Shape
from shared.prefill_loader import CONSUMER_WARPS, Source, TileLoader

PLACES = 3  # chunks whose partials are kept
# `progress` of a chunk, bytes
GIVEN, COMBINING, DONE, COMBINED, PROGRESS_BYTES = 0, 4, 8, 12, 16


class Units(TileLoader):
    def place_units(self):
        """Shared memory behind what TileLoader needs."""
        self.units_at = self.dynamic_smem  # 2, then the number of the combining warps' unit, twice
        self.combining_at = self.units_at + 8
        self.mbarrier["unit_full"] = self.combining_at + 8
        self.mbarrier["unit_empty"] = self.combining_at + 24
        self.dynamic_smem += 48

    def release(self, base, lane, name, stage, ok):
        hopper.mbarrier_arrive_if(self.bar(base, name, stage), Int32((lane == 0) & (ok != 0)))

    def chunk_of(self, number, chunk_bits, all_tokens, chunk_heads):
        in_tokens = (all_tokens + (Int32(1) << chunk_bits) - 1) >> chunk_bits
        group = ptx.divide_u32(number, in_tokens)
        first = (number - group * in_tokens) << chunk_bits
        return Chunk(first, ptx.minimum_i32(all_tokens - first, Int32(1) << chunk_bits), group * chunk_heads)

    def place_of(self, number):
        return number - ptx.divide_u32(number, Int32(PLACES)) * PLACES

    # ---- warp 0, and what the consumers get of it

    @cute.jit
    def produce_units(
        self,
        base: Int32,
        lane: Int32,
        counters: Int64,
        chunk_count: Int32,
        ctas: Int32,
        first_chunk: Int32,
        chunk_bits: Int32,
        all_tokens: Int32,
        chunks: Int64,
        most_tiles: Int32,
        source: Source,
    ):
        stage, q_parity, run, landed = self.empty_rings()
        which, freed = Int32(0), Int32(1)
        units = chunk_count * ctas
        unit = progress.take(counters + GIVEN, lane)
        while (unit >= 0) & (unit < units):
            following = progress.take(counters + GIVEN, lane)
            number = ptx.divide_u32(unit, ctas)
            part = unit - number * ctas
            first, stop = self.share_of(chunks, first_chunk + number, most_tiles, part, ctas)
            if first < stop:
                self.publish_unit(base, lane, which, freed, number)
                which = which ^ 1
                freed = freed ^ (which ^ 1)
                chunk = self.chunk_of(first_chunk + number, chunk_bits, all_tokens, source.chunk_heads)
                rings = (stage, q_parity, run, landed)
                stage, q_parity, run, landed = self.produce(base, lane, first, stop, *rings, source, chunk)
            else:
                done = counters + Int64(number) * PROGRESS_BYTES + DONE
                progress.add_if(done, Int32(CONSUMER_WARPS), lane == 0)
            unit = following
        self.publish_unit(base, lane, which, freed, Int32(-1))
        self.end_blocks(base, lane, run)

    def publish_unit(self, base, lane, which, freed, number):
        smem.mbarrier_wait(self.bar(base, "unit_empty", which), freed)
        smem.store_i32_if(base + self.units_at + which * 4, number, Int32(lane == 0))
        hopper.mbarrier_arrive_if(self.bar(base, "unit_full", which), Int32(lane == 0))

    def next_unit(self, base, lane, which, turn):
        smem.mbarrier_wait(self.bar(base, "unit_full", which), turn)
        number = smem.load_i32(base + self.units_at + which * 4)
        ptx.warp_barrier()
        self.release(base, lane, "unit_empty", which, Int32(1))
        return number

    # ---- warps 4-7

    @cute.jit
    def combine_units(
        self,
        base: Int32,
        thread: Int32,
        counters: Int64,
        chunk_count: Int32,
        ctas: Int32,
        first_chunk: Int32,
        chunk_bits: Int32,
        all_tokens: Int32,
        place_slots: Int32,
        partials: Int64,
        sums: Int64,
        state: Int64,
        output: Output,
        shape: Shape,
    ):
        units = chunk_count * ctas
        turn = Int32(0)
        unit = self.next_combination(base, thread, counters, turn, units)
        while unit < units:
            number = ptx.divide_u32(unit, ctas)
            part = unit - number * ctas
            if thread < 32:
                done = counters + Int64(number) * PROGRESS_BYTES + DONE
                progress.wait_for(done, ctas * CONSUMER_WARPS)
            hopper.named_barrier(BARRIER, THREADS)
            chunk = self.chunk_of(first_chunk + number, chunk_bits, all_tokens, shape.chunk_heads)
            rows = chunk.tokens * shape.chunk_heads
            before = Int64(self.place_of(number)) * Int64(place_slots)
            self.combine.walk(
                base + self.ring_at,
                base + self.weights_at,
                thread,
                Int32(Int64(rows) * Int64(part) // Int64(ctas)),
                Int32(Int64(rows) * Int64(part + 1) // Int64(ctas)),
                partials + before * self.combine.value_bytes,
                sums + before * self.combine.sums_bytes,
                state,
                output,
                chunk,
                shape,
            )
            turn = turn ^ 1
            unit = self.next_combination(base, thread, counters, turn, units)
            if thread == 0:
                # Not kept in a register through the combination.
                ended = ptx.divide_u32(smem.load_i32(base + self.combining_at + (turn ^ 1) * 4), ctas)
                combined = counters + Int64(ended) * PROGRESS_BYTES + COMBINED
                progress.add_if(combined, Int32(1), True)

    @cute.jit
    def next_combination(self, base: Int32, thread: Int32, counters: Int64, turn: Int32, units: Int32):
        """All of the combining warps are done with the unit before when this returns."""
        at = base + self.combining_at + turn * 4
        if thread < 32:
            unit = Int32(0x7FFFFFFF)
            if units > 0:
                unit = progress.take(counters + COMBINING, thread)
            smem.store_i32_if(at, unit, Int32(thread == 0))
        hopper.named_barrier(BARRIER, THREADS)
        return smem.load_i32(at)
