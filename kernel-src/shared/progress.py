"""Counters in global memory by which the CTAs of one launch share out its work and follow each other.

Work is cut into units with numbers; a CTA takes the next number when it has room (`take`). A unit may wait for units with
lower numbers only: those have been taken, by CTAs that are running, so that a launch comes to its end however few of its
CTAs run at a time.
"""

from cutlass import Int32

from shared import ptx
from shared.ptx import asm


def take(counter, lane):
    """The next number, by a whole warp."""
    text = "{ .reg .pred p; setp.eq.s32 p, $2, 0; mov.b32 $0, 0; @p atom.relaxed.gpu.global.add.u32 $0, [$1], 1; }"
    return ptx.shuffle(asm(text, "r", "lr", [counter, lane])[0], Int32(0))


def add_if(counter, amount, ok):
    """What this thread wrote or read before, and what it knows others to have, precedes it for those who see the sum."""
    text = "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p red.release.gpu.global.add.u32 [$0], $1; }"
    asm(text, "", "lrr", [counter, amount, Int32(ok)])


def wait_for(counter, amount):
    """Until a counter is at least `amount`."""
    load = "ld.acquire.gpu.global.b32 x, [$0]; setp.ge.s32 p, x, $1;"
    text = "{ .reg .pred p; .reg .b32 x; again: %s @p bra done; nanosleep.u32 64; bra again; done: }" % load
    asm(text, "", "lr", [counter, amount])
