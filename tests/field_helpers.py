"""What test_field_cases.py builds problems with, and one way to call the package, whatever executes it.

Cases are built, and judged by the oracle, on the CPU; a call moves them to the device and its results back.
"""

import dataclasses

import cases
import oracle
import torch

import m3_sparse

BF16, INF = torch.bfloat16, float("inf")
GROUP16 = (16, 1)  # heads that every formulation takes

# A program: the package at sys.argv[1] where an import of what compiles, or of what its launches don't need, raises.
BARE = """if True:
    import importlib.util, sys, torch
    for name in ("cutlass", "quack", "flash_attn", "triton", "cuda", "tvm_ffi", "kernels"):
        sys.modules.setdefault(name, None)
    folder = sys.argv[1]
    spec = importlib.util.spec_from_file_location(
        "m3_sparse", folder + "/__init__.py", submodule_search_locations=[folder])
    sys.modules["m3_sparse"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    package.explain("sparse_attention")
    out, lse = package.merge_states(torch.ones(2, 1, 1, 128), torch.zeros(2, 1, 1))
    assert torch.equal(out, torch.ones(1, 1, 128))"""


def mover(device):
    """A function that moves tensors to a device: each distinct buffer once, its views laid over the copy with the same
    strides."""
    buffers = {}

    def move(x):
        if not isinstance(x, torch.Tensor) or x.device.type == device:
            return x
        storage = x.untyped_storage()
        if storage.data_ptr() not in buffers:
            whole = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)
            buffers[storage.data_ptr()] = whole.to(device).untyped_storage()
        view = torch.empty(0, dtype=x.dtype, device=device)
        return view.set_(buffers[storage.data_ptr()], x.storage_offset(), x.shape, x.stride())

    return move


def moved(case, device):
    """The case on a device."""
    move = mover(device)
    return dataclasses.replace(case, **{f.name: move(getattr(case, f.name)) for f in dataclasses.fields(case)})


class Backend:
    """Calls one backend's functions with the cases' tensors on a device."""

    def __init__(self, name, device="cpu"):
        self.name, self.device = name, device

    def formulations(self, case):
        """Every way in which sparse_attention can compute a case."""
        if self.name == "torch":
            return (None,)
        union = case.q.shape[1] == 16 * case.k_cache.shape[1]
        return (None, "decode", "kv_stationary", "union") if union else (None, "decode", "kv_stationary")

    def attend(self, call, function, case, **options):
        """(out, lse) on the CPU; both start as NaN, so that a row left unwritten shows."""
        case = moved(case, self.device)
        out = cases.nan_like(case.q.shape, case.q.dtype).to(self.device)
        lse = cases.nan_like(case.q.shape[:2], torch.float32).to(self.device)
        with m3_sparse.backend(self.name):
            out, lse = call(function, case, out=out, lse=lse, **options)
        return out.cpu(), lse.cpu()

    def sparse(self, case, **options):
        return self.attend(cases.call_sparse, m3_sparse.sparse_attention, case, **options)

    def dense(self, case, **options):
        return self.attend(cases.call_dense, m3_sparse.dense_attention, case, **options)

    def every(self, case, formulations=None, **options):
        """{formulation: (out, lse)}."""
        names = formulations or self.formulations(case)
        return {name: self.sparse(case, formulation=name, **options) for name in names}

    def check(self, case, formulations=None, **options):
        """Every formulation against float64; returns what `every` does."""
        args, lengths = case.sparse()
        want, want_lse = oracle.sparse_attention(*args, **lengths, **options)
        results = self.every(case, formulations, **options)
        for out, lse in results.values():
            oracle.check_attention(out, lse, want, want_lse)
        return results

    def check_dense(self, case, **options):
        args, lengths = case.dense()
        out, lse = self.dense(case, **options)
        oracle.check_attention(out, lse, *oracle.dense_attention(*args, **lengths, **options))
        return out, lse

    def select(self, case, **options):
        """(ids, scores) on the CPU. The selection alone must be the same."""
        args, lengths = moved(case, self.device).index()
        with m3_sparse.backend(self.name):
            ids, scores = m3_sparse.select_blocks(*args, **lengths, return_scores=True, **options)
            alone = m3_sparse.select_blocks(*args, **lengths, **options)
        assert torch.equal(ids, alone), "the selection depends on whether scores are returned"
        return ids.cpu(), scores.cpu()

    def check_select(self, case, **options):
        """Scores within the contract's epsilon of float64, members within it, count, order and ties exact."""
        args, lengths = case.index()
        ids, scores = self.select(case, **options)
        want, epsilon = oracle.block_scores(*args, **lengths), oracle.score_epsilon(*args, **lengths)
        assert torch.equal(scores.isinf(), want.isinf()) and not scores.isnan().any()
        if self.device != "cpu" and args[0].element_size() == 1:
            epsilon = epsilon * 64  # tensor cores add fp8 products with fewer bits than fp32 has
        finite = ~want.isinf()
        assert ((scores.double() - want).abs() <= epsilon[..., None])[finite].all()
        counts = counts_of(case)
        names = {"topk": "topk", "local_blocks": "local", "init_blocks": "init"}
        rules = {names[k]: v for k, v in options.items()}
        oracle.check_selection(ids, want, epsilon, counts, **rules)
        assert torch.equal(ids, oracle.select(scores.double(), counts, **rules)), "not what the returned scores demand"
        return ids, scores

    def captured(self, function):
        """What repeats `function()`: itself, or on a GPU the replay of its graph."""
        if self.device == "cpu":
            return function
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()

        def replay():
            graph.replay()
            torch.cuda.synchronize()

        return replay

    def peak(self, function):
        """Bytes that a call allocates: at a time on a GPU, in its largest single piece on the CPU."""
        if self.device == "cpu":
            with torch.profiler.profile(profile_memory=True) as profile:
                function()
            return max(event.self_cpu_memory_usage for event in profile.events())
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def counts_of(case):
    """Candidates of each row."""
    args, lengths = case.index()
    return oracle.candidates(*lengths.values(), args[2], args[1].shape[1], len(args[0]))


def make(q_lens, kv_lens, heads=GROUP16, **options):
    return cases.make(q_lens, kv_lens, heads=heads, **{"dtype": BF16, **options})


def is_empty(out, lse):
    return bool((out == 0).all() and (lse == -INF).all())


def same(one, other, what):
    for a, b in zip(one, other):
        oracle.check_bitwise(a, b, what)


def same_everywhere(ones, others):
    assert ones.keys() == others.keys()
    for name, one in ones.items():
        same(one, others[name], f"formulation {name}")


def with_ids(case, *rows):
    """The same ids in every row and head for each of `rows`, cyclically, -1 behind them."""
    case.ids.fill_(-1)
    for t in range(len(case.ids)):
        ids = rows[t % len(rows)]
        case.ids[t, :, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return case


def crafted(values):
    """One row whose block scores are `values`: few pages, and a table that repeats them."""
    levels, where = values.to(BF16).unique(return_inverse=True)
    case = make([1], [128], heads=(1, 1))
    case.index_k_cache = torch.zeros(len(levels), 128, 128, dtype=BF16)
    case.index_k_cache[:, :, 0] = levels[:, None]
    case.index_q = torch.zeros(1, 1, 128, dtype=BF16)
    case.index_q[..., 0] = 1
    case.index_table = where.to(torch.int32)[None]
    case.kv_lens = [128 * len(values)]
    case.seqused_k = torch.tensor(case.kv_lens, dtype=torch.int32)
    return case


def draw_again(case, seed, kv_lens):
    """Other lengths, pages, selections and queries, in the same tensors; contents of pages go with their numbers."""
    gen = cases.generator(seed)
    order = torch.randperm(len(case.k_cache), generator=gen)
    for cache in (case.k_cache, case.v_cache):
        cache.copy_(cache[order].clone())
    used = (case.block_table >= 0) & (case.block_table < len(order))
    case.block_table[used] = order.argsort()[case.block_table[used].long()].to(torch.int32)
    case.seqused_k.copy_(torch.tensor(kv_lens))
    case.ids.copy_(torch.randint(-2, 8, case.ids.shape, generator=gen))
    case.q.copy_(torch.randn(case.q.shape, generator=gen))
    case.index_q.copy_(torch.randn(case.index_q.shape, generator=gen))
