"""Tests the cells of tools/determinism_table.py: for a way to compute and a change that leaves each row's own inputs as
they are, equal bits where the table promises them, and results within the error bound where it doesn't.
"""

import dataclasses
import functools

import cases
import field_helpers
import oracle
import property_bounds as bounds
import torch
from determinism_table import BITWISE, CELLS, CHANGES, NONE, WAYS

from m3_sparse import ops

SIZES = {
    # q_lens, kv_lens, heads
    "small": ([9, 2, 17, 1], [700, 130, 300, 513], (16, 1)),
    "large": ([300, 3, 261, 1], [1500, 130, 800, 1025], (16, 1)),
}
NUMBERS = {"decode": 3, "union": 1, "kv_stationary": 2, "default": 0}


def cells(backend):
    """(way, change) of a backend that say something."""
    named = {"torch": lambda way: way.endswith("/torch"), "aot": lambda way: not way.endswith("/torch")}[backend]
    return [(way, change) for way in WAYS for change in CHANGES if named(way) and CELLS[way, change] != NONE]


class Problem:
    """A batch and what a way makes of it: tensors whose first dimension is a row of the batch."""

    def __init__(self, way, size, device="cpu"):
        self.op, self.way = way.split("/")
        self.name, self.size, self.device = way, size, device
        q_lens, kv_lens, heads = SIZES[size]
        torch_way = self.way == "torch"
        self.dtype = torch.float32 if torch_way else torch.bfloat16
        if self.op == "select":
            heads = (4, 4)
        self.case = cases.make(
            q_lens, kv_lens, heads=heads, dtype=self.dtype, topk=12, style="clean", poison="zero", seed=5
        )  # fmt: skip
        self.case.kv_lens = kv_lens
        gen = cases.generator(9)
        tokens = sum(q_lens)
        self.outs = torch.randn(3, tokens, 4, 128, generator=gen).to(self.dtype)
        self.lses = torch.randn(3, tokens, 4, generator=gen)

    # ---- changes: (problem, rows of the base that its rows are)

    def variants(self, change):
        case = self.case
        count = len(case.q_lens)
        if change == "repeat":
            return [(self, None), (self, None)]
        if change == "batch":
            pairs = [[b] for b in range(count)] + [[count - 1, 0], [0, count - 1], [1, 2, 0]]
            return [self.with_requests(some) for some in pairs]
        if change == "permutation":
            return [self.with_requests(order) for order in ([3, 2, 1, 0], [1, 0, 3, 2])]
        if change == "pages":
            return [(self.with_pages(seed), None) for seed in (1, 2)]
        if change == "selection":
            return [(self.with_ids(seed), None) for seed in (1, 2)]
        raise ValueError(change)

    def copy(self, **changed):
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.case = dataclasses.replace(self.case, **changed)
        return other

    def with_requests(self, some):
        """The requests `some`, in that order."""
        case, at = self.case, [0]
        for n in case.q_lens:
            at.append(at[-1] + n)
        rows = torch.cat([torch.arange(at[b], at[b + 1]) for b in some])
        q_lens, kv_lens = [case.q_lens[b] for b in some], [case.kv_lens[b] for b in some]
        other = self.copy(
            q=case.q[rows], index_q=case.index_q[rows], ids=case.ids[rows], block_table=case.block_table[some],
            index_table=case.index_table[some], q_lens=q_lens, kv_lens=kv_lens,
            cu_seqlens_q=torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32),
            seqused_k=torch.tensor(kv_lens, dtype=torch.int32),
        )  # fmt: skip
        other.outs, other.lses = self.outs[:, rows], self.lses[:, rows]
        return other, rows

    def with_pages(self, seed):
        """The same tokens in other pages, among more of them."""
        changed = {}
        for table_name, names in (("block_table", ("k_cache", "v_cache")), ("index_table", ("index_k_cache",))):
            table = getattr(self.case, table_name)
            pages = len(getattr(self.case, names[0]))
            place = torch.randperm(pages + 5, generator=cases.generator(seed))[:pages]
            for name in names:
                old = getattr(self.case, name)
                new = old.new_zeros(pages + 5, *old.shape[1:])
                new[place] = old
                changed[name] = new
            used = (table >= 0) & (table < pages)
            changed[table_name] = torch.where(used, place[table.clamp(0, pages - 1).long()].to(torch.int32), table)
        return self.copy(**changed)

    def with_ids(self, seed):
        """The same blocks in another order; -1 elsewhere, or blocks twice and ids that are no good in its place."""
        ids = self.case.ids
        gen = cases.generator(seed)
        bad = torch.tensor([-1, -1, 2**31 - 1, -5, 4096], dtype=torch.int32)
        other = torch.where(
            torch.rand(ids.shape, generator=gen) < 0.4, ids[..., :1], bad[torch.randint(0, 5, ids.shape, generator=gen)]
        )
        ids = torch.where(ids < 0, other, ids)
        return self.copy(ids=ids.gather(-1, torch.rand(ids.shape, generator=gen).argsort(-1)))

    def cuts(self):
        """Options of `run` among which the work is cut differently."""
        return {
            "sparse/decode": [{"splits": n} for n in (1, 2, 4, 16)],
            "sparse/kv_stationary": [{"chunk_bits": n} for n in (0, 8)],
            "dense/default": [{"splits": n} for n in (1, 2, 3)],
            "select/prefill": [{"number": n} for n in (2, 3)],
        }[self.name]

    # ---- a call, into buffers that a graph can keep

    def prepare(self, wrap=lambda f: f, splits=0, number=None, chunk_bits=None):
        """(a function that computes into the same tensors each time, those tensors)"""
        case = field_helpers.moved(self.case, self.device)
        lengths = (case.cu_seqlens_q, case.seqused_k)
        backend = "torch" if self.way == "torch" else "aot"
        call = ops.BUILT[{"select": "select_blocks", "merge": "merge_states", "store": "store_kv"}.get(
            self.op, f"{self.op}_attention"), backend]  # fmt: skip
        rows, place = len(case.q), {"device": self.device}
        if self.op == "select":
            tensors = (case.index_q, case.index_k_cache, case.index_table, *lengths)
            blocks = -(-case.index_table.shape[1] * case.page // 128)
            ids = torch.full((rows, 4, 3), -7, dtype=torch.int32, **place)
            scores = torch.full((rows, 4, blocks), float("nan"), **place)
            way = {"decode": 1, "prefill": 2}.get(self.way, 0) if number is None else number
            extra = (1, 0) if backend == "torch" else (1, 0, way)
            kept = None if way == 3 else scores  # fused stores none
            results = [ids] if self.name == "select/prefill" else [ids, scores]
            return lambda: call(ids, kept, *tensors, *extra), results
        if self.op in ("sparse", "dense"):
            out = torch.full(case.q.shape, float("nan"), dtype=case.q.dtype, **place)
            lse = torch.full(case.q.shape[:2], float("nan"), **place)
            ids = (case.ids,) if self.op == "sparse" else ()
            args = (out, lse, case.q, case.k_cache, case.v_cache, *ids, case.block_table, *lengths, 128**-0.5, True)
            if backend == "torch":
                return lambda: call(*args, None, None), [out, lse]
            if self.op == "dense":
                n = 1 if self.way == "one split" else splits
                return lambda: call(*args, None, None, n), [out, lse]
            if chunk_bits:
                chunks = wrap(getattr(ops, "ops", ops).aot_sparse_attention_kv_stationary.default)
                return lambda: chunks(*args, None, None, None, chunk_bits, 1), [out, lse]
            return lambda: call(*args, None, None, splits, True, NUMBERS[self.way]), [out, lse]
        if self.op == "merge":
            outs, lses = self.outs.to(self.device), self.lses.to(self.device)
            out, lse = outs.new_zeros(outs.shape[1:]), lses.new_zeros(lses.shape[1:])
            return lambda: call(out, lse, outs, lses), [out, lse]
        k, v = (x.to(self.device) for x in self.stored())
        caches = [torch.zeros(case.k_cache.shape, dtype=torch.float8_e4m3fn, **place) for _ in range(2)]
        slots = self.slots().to(self.device)
        results = [torch.zeros(rows, *k.shape[1:], dtype=torch.uint8, **place) for _ in range(2)]

        def store():
            call(k, v, None, *caches, None, slots, None, None)
            for result, cache in zip(results, caches):
                result.copy_(cache.view(torch.uint8)[slots // 128, :, slots % 128])

        return store, results

    def stored(self):
        """K and V rows that go with the rows of the batch."""
        x = self.case.q[:, : self.case.k_cache.shape[1]]
        return x * 3, x * 40

    def slots(self):
        """Where a row's token lies: its own page and position, so that it goes where its request is."""
        found = []
        for b, (q_len, kv_len) in enumerate(zip(self.case.q_lens, self.case.kv_lens)):
            for t in range(kv_len - q_len, kv_len):
                found.append(int(self.case.block_table[b, t // 128]) * 128 + t % 128)
        return torch.tensor(found)

    # ---- judging

    def judge(self, results, label, rows):
        """Within the bounds of property_bounds.py; `rows`: which rows of the base problem these are, whose exact results
        are theirs too."""
        exact, rows = exactly(self.name, self.size), slice(None) if rows is None else rows
        if self.op == "select":
            want, sizes, counts = exact[0][rows], exact[1][rows], torch.tensor(exact[2])[rows].tolist()
            allowed = bounds.scores("select_blocks", label, results[1], want, sizes, self.dtype, self.dtype)
            return bounds.selection(results[0], want, allowed, counts, topk=3)
        exact = oracle.Attended(*(x[rows] for x in exact))
        kind = {"torch": "torch", "default": "kv_stationary"}.get(self.way, self.way)
        kind = "dense" if self.op == "dense" and kind != "torch" else kind
        bounds.attention(f"{self.op}_attention", label, kind, *results, exact, self.dtype)


@functools.cache
def exactly(way, size):
    """What the oracle says of the base problem."""
    problem = Problem(way, size)
    case = problem.case
    lengths = {"cu_seqlens_q": case.cu_seqlens_q, "seqused_k": case.seqused_k}
    if problem.op == "select":
        args = (case.index_q, case.index_k_cache, case.index_table)
        want, sizes = (f(*args, **lengths) for f in (oracle.block_scores, oracle.score_sizes))
        return want, sizes, oracle.candidates(*lengths.values(), case.index_table, case.page, len(case.q))
    args, _ = case.sparse() if problem.op == "sparse" else case.dense()
    return getattr(oracle, f"{problem.op}_attention")(*args, **lengths, sizes=True)


def computed(problem, execute, wrap, **options):
    function, results = problem.prepare(wrap, **options)
    execute(function)
    return [x.cpu() for x in results]


def check(way, change, size, execute, label, device="cpu", wrap=lambda f: f):
    """One cell. `execute` runs a function, at once or as a graph. Returns whether any bit differed."""
    problem = Problem(way, size, device)
    promise = CELLS[way, change]
    if change == "cut":
        runs = [(problem, computed(problem, execute, wrap, **options), None) for options in problem.cuts()]
    else:
        variants = [(problem, None), *problem.variants(change)]
        runs = [(variant, computed(variant, execute, wrap), rows) for variant, rows in variants]
    base, differs = runs[0][1], False
    for variant, results, rows in runs[1:]:
        want = base if rows is None else [x[rows] for x in base]
        for got, expected in zip(results, want):
            same = torch.equal(oracle.stored_bytes(got), oracle.stored_bytes(expected))
            differs |= not same
            if promise == BITWISE:
                oracle.check_bitwise(got, expected, f"{way}, {CHANGES[change]}")
    if promise != BITWISE:
        for variant, results, rows in runs:
            variant.judge(results, label, rows)
    return differs
