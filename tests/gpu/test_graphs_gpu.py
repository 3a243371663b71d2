"""CUDA graphs of every operation: replays follow what the inputs hold now, and nothing else.

Captured at the largest lengths; replayed with shorter, no and longer ones, other pages, other selections and padded rows.
What a replay writes must be what a call writes that is made with the same inputs then, bit for bit.
"""

import copy

import cases
import oracle
import pytest
import torch
from field_helpers import BF16, draw_again, moved

import m3_sparse

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKEND = "aot"
E4M3 = torch.float8_e4m3fn
FIELDS = ("q", "k_cache", "v_cache", "block_table", "index_q", "index_k_cache", "seqused_k", "cu_seqlens_q", "ids")


class Attention:
    """Selection and attention of a batch; dense and decode steps derive from it."""

    def __init__(self, q_lens, kv_lens, kv=BF16, heads=(32, 2), formulation=None, **options):
        self.longest, self.rows, self.formulation = list(kv_lens), list(q_lens), formulation
        scales = "scalar" if kv == E4M3 else None
        self.case = cases.make(
            q_lens, kv_lens, heads=heads, dtype=BF16, kv_dtype=kv, poison="zero", scales=scales, seed=7, **options
        )
        self.extra = {}  # inputs besides the case's: name -> tensor of the CPU

    def change(self, name):
        """The next inputs, in place in the tensors of the CPU."""
        q_lens, kv_lens = self.rows, self.longest
        if name == "shrunk":
            kv_lens = [max(n // 3, 1) for n in kv_lens]
        elif name == "zero":
            kv_lens = [0 for n in kv_lens]
        elif name == "one token":
            kv_lens = [1 for n in kv_lens]
        elif name == "padded":
            q_lens = [n // 2 for n in q_lens]
        elif name == "padded entirely":
            q_lens = [0 for n in q_lens]
        draw_again(self.case, len(name), kv_lens)
        self.case.cu_seqlens_q.copy_(torch.tensor([0, *q_lens]).cumsum(0))
        real = sum(q_lens)
        self.case.q[real:] = self.case.index_q[real:] = float("nan")

    def tensors(self):
        return {**{name: getattr(self.case, name) for name in FIELDS}, **self.extra}

    def run(self, t, backend=BACKEND):
        """All results, of tensors by the names of `tensors`."""
        lengths = {"cu_seqlens_q": t["cu_seqlens_q"], "seqused_k": t["seqused_k"]}
        scales = {n: None if getattr(self.case, n) is None else t[n] for n in ("k_scale", "v_scale")}
        with m3_sparse.backend(backend):
            return self.compute(t, lengths, scales)

    def compute(self, t, lengths, scales):
        chosen = m3_sparse.select_blocks(t["index_q"], t["index_k_cache"], t["index_table"], **lengths)
        out, lse = m3_sparse.sparse_attention(
            t["q"], t["k_cache"], t["v_cache"], t["ids"], t["block_table"], **lengths, **scales, return_lse=True,
            formulation=self.formulation,
        )  # fmt: skip
        return out, lse, chosen

    def check(self, found, want):
        """Results against those of the torch backend."""
        oracle.check_attention(*found[:2], want[0].double(), want[1].double(), BF16)
        for ids in found[2:]:  # which blocks: near ties aside, decided in test_select_gpu.py
            assert torch.equal(ids >= 0, want[2] >= 0)

    def placed(self, device):
        """The inputs on a device, in memory of their own."""
        case = moved(self.case, device) if device != "cpu" else copy.deepcopy(self.case)
        names = (*FIELDS, "index_table", "k_scale", "v_scale")
        return {**{n: getattr(case, n) for n in names}, **{n: x.to(device, copy=True) for n, x in self.extra.items()}}


class Decode(Attention):
    """A step of a model's layer: store the new tokens, select, attend to what was selected."""

    def __init__(self, q_lens, kv_lens, kv=BF16, **options):
        super().__init__(q_lens, kv_lens, kv, **options)
        total, heads = len(self.case.q), self.case.k_cache.shape[1]
        for name in ("k", "v"):
            self.extra[name] = torch.zeros(total, heads, 128, dtype=BF16)
        self.extra["index_k"] = torch.zeros(total, 128, dtype=BF16)
        self.extra["slots"] = torch.zeros(total, dtype=torch.int64)

    def change(self, name):
        super().change(name)
        generator = cases.generator(len(name))
        for x in ("k", "v", "index_k"):
            self.extra[x].copy_(torch.randn(self.extra[x].shape, generator=generator))
        count = len(self.case.k_cache) * self.case.page
        slots = torch.randperm(count, generator=generator)[: len(self.extra["slots"])]
        slots[1::4] = -1
        self.extra["slots"].copy_(slots)

    def compute(self, t, lengths, scales):
        m3_sparse.store_kv(
            t["k"], t["v"], t["index_k"], t["k_cache"], t["v_cache"], t["index_k_cache"], t["slots"], **scales
        )
        chosen = m3_sparse.select_blocks(t["index_q"], t["index_k_cache"], t["index_table"], **lengths)
        tables = (t["block_table"],)
        out, lse = m3_sparse.sparse_attention(
            t["q"], t["k_cache"], t["v_cache"], chosen, *tables, **lengths, **scales, return_lse=True
        )
        # A selection's near ties may fall either way, so what the torch backend checks is of the given ids.
        given, given_lse = m3_sparse.sparse_attention(
            t["q"], t["k_cache"], t["v_cache"], t["ids"], *tables, **lengths, **scales, return_lse=True
        )
        return given, given_lse, chosen, out, lse, t["k_cache"], t["v_cache"], t["index_k_cache"]

    def check(self, found, want):
        oracle.check_attention(*found[:2], want[0].double(), want[1].double(), BF16)
        assert torch.equal(found[2] >= 0, want[2] >= 0)
        assert not found[3].isnan().any()
        for got, expected in zip(found[5:], want[5:]):
            oracle.check_bitwise(got, expected, "stored")


class Dense(Attention):
    def compute(self, t, lengths, scales):
        return m3_sparse.dense_attention(
            t["q"], t["k_cache"], t["v_cache"], t["block_table"], **lengths, return_lse=True
        )


class Merge(Attention):
    """States of which more or fewer are alive."""

    def __init__(self):
        self.outs, self.lses = torch.zeros(5, 40, 8, 128, dtype=BF16), torch.zeros(5, 40, 8)
        self.case = None

    def change(self, name):
        generator = cases.generator(len(name))
        self.outs.copy_(torch.randn(self.outs.shape, generator=generator))
        self.lses.copy_(torch.randn(self.lses.shape, generator=generator))
        share = {"shrunk": 0.7, "zero": 1.0, "padded": 0.3}.get(name, 0.0)
        self.lses[torch.rand(self.lses.shape, generator=generator) < share] = float("-inf")

    def tensors(self):
        return {"outs": self.outs, "lses": self.lses}

    def placed(self, device):
        return {n: x.to(device, copy=True) for n, x in self.tensors().items()}

    def run(self, t, backend=BACKEND):
        with m3_sparse.backend(backend):
            return m3_sparse.merge_states(t["outs"], t["lses"])


PREFILL = [200, 70, 33], [900, 400, 150]
STEPS = {
    "decode": lambda: Decode([1, 4, 2], [900, 300, 131]),
    "decode fp8": lambda: Decode([1, 4, 2], [900, 300, 131], E4M3),
    "one token": lambda: Decode([1] * 5, [900, 300, 131, 2, 129], heads=(16, 1)),
    "prefill": lambda: Attention(*PREFILL),
    "prefill fp8": lambda: Attention(*PREFILL, E4M3),
    "decode kernel": lambda: Attention([30, 20, 9], [500, 300, 150], formulation="decode"),
    "union": lambda: Attention(*PREFILL, formulation="union"),
    "union fp8": lambda: Attention(*PREFILL, E4M3, formulation="union"),
    "kv_stationary": lambda: Attention(*PREFILL, formulation="kv_stationary"),
    "kv_stationary fp8": lambda: Attention(*PREFILL, E4M3, formulation="kv_stationary"),
    "dense": lambda: Dense([70, 1, 33], [900, 400, 150]),
    "dense decode": lambda: Dense([1, 1, 2], [900, 400, 150]),
    "merge_states": Merge,
}
CHANGES = (
    "longest",
    "shrunk",
    "zero",
    "longest again",
    "other pages",
    "padded",
    "one token",
    "padded entirely",
    "grown",
)


class Graph:
    """What `function()`, which returns tensors, does; replayed on a GPU, called again on the CPU."""

    def __init__(self, function):
        self.function = function
        if DEVICE == "cpu":
            self.outputs = function()
            return
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            function()
        self.stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.outputs = function()

    def replay(self):
        if DEVICE == "cuda":
            return self.graph.replay()
        for old, new in zip(self.outputs, self.function()):
            old.copy_(new)

    def spoil(self):
        """Results that no replay has written yet."""
        for x in self.outputs:
            if x.dtype.is_floating_point and x.element_size() > 1:
                x.fill_(float("nan"))
            elif x.dtype == torch.int32:
                x.fill_(-77)


def bits(x):
    return x.contiguous().view(torch.uint8)


def same(ones, others, what):
    for n, (a, b) in enumerate(zip(ones, others)):
        assert torch.equal(bits(a), bits(b)), f"{what}: result {n}"


def results_of(step):
    """How many of a step's results are its own: caches come last, and are inputs too."""
    return 5 if isinstance(step, Decode) else None


def load(step, inputs):
    for name, x in step.tensors().items():
        inputs[name].copy_(x)


def captured(step):
    """(inputs on the device, graph), captured with the longest lengths."""
    step.change("longest")
    inputs = step.placed(DEVICE)
    graph = Graph(lambda: step.run(inputs))
    load(step, inputs)
    return inputs, graph


def clone(tensors):
    """Tensors of the same layout in other memory."""
    copies = {}
    for name, x in tensors.items():
        copies[name] = x
        if x is not None:
            copies[name] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
    return copies


@pytest.mark.parametrize("name", STEPS)
def test_replays_follow_their_inputs(name):
    step = STEPS[name]()
    inputs, graph = captured(step)
    own = results_of(step)
    for change in CHANGES:
        step.change(change)
        load(step, inputs)
        before = clone(inputs)
        for x in graph.outputs[:own]:
            x.fill_(float("nan") if x.dtype.is_floating_point else -77)
        graph.replay()
        found = [x.clone() for x in graph.outputs]
        same(step.run(before), found, f"{change}: a call now")
        step.check([x.cpu() for x in found], [x.cpu() for x in step.run(step.placed(DEVICE), "torch")])
        if DEVICE == "cuda":
            load(step, inputs)
            graph.replay()
            same(found, graph.outputs, f"{change}: the second replay")


@pytest.mark.parametrize("name", STEPS)
def test_a_thousand_replays(name, count=1000 if DEVICE == "cuda" else 2):
    step = STEPS[name]()
    _, graph = captured(step)
    graph.replay()
    first = [bits(x).clone() for x in graph.outputs]
    changed = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(count):
        for x in graph.outputs[: results_of(step)]:
            x.zero_()
        graph.replay()
        for x, y in zip(graph.outputs, first):
            changed += (bits(x) != y).any()
    assert int(changed) == 0


@pytest.mark.parametrize("name", STEPS)
def test_two_graphs_on_two_streams(name, count=60 if DEVICE == "cuda" else 1):
    """Replayed at the same time, each with inputs of its own: they share no workspace."""
    both = []
    for change in ("longest", "shrunk"):
        step = STEPS[name]()
        inputs, graph = captured(step)
        step.change(change)
        load(step, inputs)
        graph.replay()
        want = [bits(x).clone() for x in graph.outputs]
        both.append((graph, results_of(step), want))
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in both] if DEVICE == "cuda" else [None, None]
    wrong = [torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in both]
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    for _ in range(count):
        for (graph, own, want), stream, bad in zip(both, streams, wrong):
            with torch.cuda.stream(stream):
                for x in graph.outputs[:own]:
                    x.zero_()
                for _ in range(4):
                    graph.replay()
                for x, y in zip(graph.outputs, want):
                    bad += (bits(x) != y).any()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert [int(bad) for bad in wrong] == [0, 0]


@pytest.mark.parametrize("name", STEPS)
def test_workspaces_live_as_long_as_their_graph(name):
    """Calls of other shapes, an emptied cache and all free memory rewritten leave a graph's workspace alone, and the graph
    leaves alone what others allocated since.
    """
    step = STEPS[name]()
    inputs, graph = captured(step)
    graph.replay()
    want = [x.clone() for x in graph.outputs]
    others = [STEPS[other]() for other in STEPS if other != name]
    for other in others[:6]:
        other.change("longest")
        other.run(other.placed(DEVICE))
    kept = []
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        for size in (1 << 29, 1 << 22, 1 << 20, 1 << 16, 1 << 12, 512) * 2:
            kept.append(torch.full((size,), 0xFF, dtype=torch.uint8, device=DEVICE))
        for _ in range(64):
            kept.append(torch.full((1 << 20,), 0xFF, dtype=torch.uint8, device=DEVICE))
        torch.cuda.synchronize()
    load(step, inputs)
    for x in graph.outputs[: results_of(step)]:
        x.zero_()
    graph.replay()
    same(want, graph.outputs, "after other calls")
    for x in kept:
        assert bool((x == 0xFF).all()), "a replay wrote memory of others"
