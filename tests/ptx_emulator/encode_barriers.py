"""mbarriers, named barriers, the cluster barrier, fences and launch control."""

from .encode_memory import ORDERINGS
from .parser import Unsupported

SHARED = ("shared", "shared::cta", "shared::cluster")


def mbarrier(p, m, args):
    what = m.rest.pop(0)
    m.take("b64")
    space = m.take(*SHARED)
    m.ignore(*ORDERINGS)
    if space is None:
        raise Unsupported("generic mbarrier address")
    cluster = space == "shared::cluster"
    if what == "init":
        m.done()
        return p.emit("mbarrier.init", p.address(args[0]) + [p.source(args[1], 32)])
    if what == "inval":
        m.done()
        return p.emit("mbarrier.inval", p.address(args[0]))
    if what in ("expect_tx", "complete_tx"):
        m.done()
        return p.emit(f"mbarrier.{what}", p.address(args[0]) + [p.source(args[1], 32)])
    if what in ("arrive", "arrive_drop"):
        return arrive(p, m, args, what == "arrive_drop", cluster)
    if what in ("try_wait", "test_wait"):
        parity = m.has("parity")
        m.done()
        operand = p.source(args[2], 32 if parity else 64)  # a fourth argument only hints how long to wait
        rows = [p.destination(args[0], "pred")] + p.address(args[1]) + [operand]
        return p.emit("mbarrier.wait", rows, (what == "try_wait") | (not parity) << 1)
    raise Unsupported("mbarrier operation")


def arrive(p, m, args, drop, cluster):
    expect = m.has("expect_tx")
    m.done()
    state = -1
    if not args[0].startswith("["):
        state = -1 if args[0] == "_" else p.destination(args[0], 64)
        args = args[1:]
    number = p.source(args[1], 32) if len(args) > 1 else -1
    rows = p.address(args[0]) + ([-1, number] if expect else [number, -1]) + [state]
    p.emit("mbarrier.arrive", rows, cluster | drop << 1)


def barrier(p, m, args):
    """bar and barrier."""
    if m.has("cluster"):
        what = m.take("arrive", "wait")
        relaxed = m.take("relaxed", "release", "acquire") == "relaxed"
        m.ignore("aligned")
        m.done()
        return p.emit(f"cluster.{what}", [], int(relaxed and what == "arrive"))
    if m.has("warp"):
        m.ignore("sync")
        m.done()
        return p.emit("bar.warp.sync", [p.source(args[0], 32)])
    m.ignore("cta", "aligned")
    what = m.take("sync", "arrive")
    m.done()
    if what is None:
        raise Unsupported("barrier operation")
    p.emit("barrier", [p.source(args[0], 32), p.source(args[1], 32) if len(args) > 1 else -1], int(what == "arrive"))


def fence(p, m, args):
    if m.opcode == "fence" and "proxy" in m.rest:
        m.take("proxy")
        # The proxies of tensor maps and of global memory need no model: their data isn't written by a program here.
        kind = next((r for r in m.rest if r.startswith(("async", "tensormap", "alias"))), None)
        whole = kind == "async" and not m.has("global") and not m.has("async::generic")
        if kind is None:
            raise Unsupported("proxy fence")
        return p.emit("fence.proxy.async" if whole else "nothing")
    p.emit("fence")


def nothing(p, m, args):
    """griddepcontrol: launches run one after the other. setmaxnreg: registers are free."""
    p.emit("nothing")


ENCODERS = {
    "mbarrier": mbarrier, "bar": barrier, "barrier": barrier, "fence": fence, "membar": fence,
    "griddepcontrol": nothing, "setmaxnreg": nothing, "pmevent": nothing,
}  # fmt: skip
