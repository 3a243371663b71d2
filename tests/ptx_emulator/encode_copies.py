"""cp.async, bulk copies and reductions, tensor (TMA) loads and stores."""

import re

from .encode_arithmetic import parts
from .parser import Unsupported

REDUCTIONS = ("add", "min", "max", "and", "or", "xor")  # after "copy", as in copies.cpp
TYPES = ("u32", "s32", "u64", "s64", "f16", "bf16", "f32", "f64")


def cp(p, m, args):
    reduction = m.opcode == "cp" and m.has("reduce")
    if not m.has("async"):
        raise Unsupported("copy")
    if m.has("bulk"):
        return bulk(p, m, args, reduction)
    if m.has("commit_group"):
        return p.emit("cp.async.commit")
    if m.has("wait_group"):
        return p.emit("cp.async.wait", [], int(args[0]))
    if m.has("wait_all"):
        return p.emit("cp.async.wait_all")
    if m.has("mbarrier"):
        m.take("arrive"), m.take("b64"), m.take("shared", "shared::cta")
        expected = m.has("noinc")
        m.done()
        return p.emit("cp.async.arrive", p.address(args[0]), int(expected))
    hint = m.has("L2::cache_hint")
    m.take("shared", "shared::cta"), m.take("global")
    m.ignore("ca", "cg")
    m.done()
    args = args[:-1] if hint else args
    size, ignore = -1, -1
    if len(args) > 3:
        if p.width(args[3]) == "pred":
            ignore = p.pred(args[3])
        else:
            size = p.source(args[3], 32)
    p.emit("cp.async", p.address(args[0]) + p.address(args[1]) + [size, ignore], int(args[2], 0))


def bulk(p, m, args, reduction):
    if m.has("commit_group"):
        m.done()
        return p.emit("bulk.commit")
    if m.has("wait_group"):
        m.ignore("read")
        m.done()
        return p.emit("bulk.wait", [], int(args[0]))
    if m.has("prefetch"):
        return p.emit("prefetch")
    hint, multicast = m.has("L2::cache_hint"), m.has("multicast::cluster")
    args = args[:-1] if hint else args
    operation = m.take(*REDUCTIONS) if reduction else None
    code = 1 + REDUCTIONS.index(operation) if operation else 0
    if m.has("tensor"):
        return tensor(p, m, args, multicast, code)
    kind = m.type() if reduction else None
    m.ignore("noftz")
    imm = code << 8 | (TYPES.index({"b32": "u32", "b64": "u64"}.get(kind, kind)) << 16 if kind else 0)
    spaces = [r for r in m.rest if r.startswith(("shared", "global"))]
    m.rest = [r for r in m.rest if r not in spaces]
    completion = m.take("mbarrier::complete_tx::bytes", "bulk_group")
    m.done()
    if completion == "bulk_group":
        if spaces != ["global", "shared::cta"]:
            raise Unsupported("bulk copy between these spaces")
        return p.emit("bulk.store", p.address(args[0]) + p.address(args[1]) + [p.source(args[2], 32)], imm)
    if not spaces[0].startswith("shared"):
        raise Unsupported("bulk copy between these spaces")
    mask = p.source(args[4], 16) if multicast else -1
    rows = p.address(args[0]) + p.address(args[1]) + p.address(args[3]) + [p.source(args[2], 32), mask]
    p.emit("bulk.load", rows, imm | int(spaces[1].startswith("shared")))


def tensor(p, m, args, multicast, code):
    rank = int(m.take("1d", "2d", "3d", "4d", "5d")[0])
    m.ignore("tile")
    spaces = [r for r in m.rest if r.startswith(("shared", "global"))]
    m.rest = [r for r in m.rest if r not in spaces]
    completion = m.take("mbarrier::complete_tx::bytes", "bulk_group")
    m.take("cta_group::1", "cta_group::2")  # where the mbarrier may be; its address says which CTA
    m.done()
    if completion == "bulk_group":
        rows = tensor_address(p, args[0], rank)
        return p.emit("tma.store", rows[:3] + p.address(args[1]) + rows[3:], rank | code << 8)
    if code or completion is None:
        raise Unsupported("tensor copy")
    rows = tensor_address(p, args[1], rank)
    mask = p.source(args[3], 16) if multicast else -1
    p.emit("tma.load", p.address(args[0]) + rows[:3] + p.address(args[2]) + [mask] + rows[3:], rank)


def tensor_address(p, token, rank):
    """[map, {coordinates}] as an address and rows."""
    found = re.fullmatch(r"\[\s*([^,\s]+)\s*,\s*(\{.*\})\s*\]", token)
    coordinates = [p.source(x, 32) for x in parts(found[2])]
    if len(coordinates) != rank:
        raise Unsupported(f"{len(coordinates)} coordinates")
    return p.address(f"[{found[1]}]") + coordinates


ENCODERS = {"cp": cp}
