"""One way to call the package for the tests of test_field_cases.py, whatever executes it: torch or aot, CPU or GPU.

Cases are built, and judged by the oracle, on the CPU; a call moves them to the device and its results back.
"""

import dataclasses

import cases
import m3_sparse
import oracle
import torch


def moved(case, device):
    """The case on a device: each distinct buffer once, its views laid over the copy with the same strides."""
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

    return dataclasses.replace(case, **{f.name: move(getattr(case, f.name)) for f in dataclasses.fields(case)})


class Backend:
    """`emulated`: the programs run in the PTX emulator, where only small problems end soon."""

    def __init__(self, name, device="cpu", emulated=False):
        self.name, self.device, self.emulated = name, device, emulated

    def formulations(self, case):
        """Every way in which sparse_attention can compute a case."""
        if self.name == "torch":
            return (None,)
        union = case.q.shape[1] == 16 * case.k_cache.shape[1]
        return (None, "decode", "kv_stationary", "union") if union else (None, "decode", "kv_stationary")

    def sparse(self, case, **options):
        """(out, lse) on the CPU; both start as NaN, so that a row left unwritten shows."""
        case = moved(case, self.device)
        out = cases.nan_like(case.q.shape, case.q.dtype).to(self.device)
        lse = cases.nan_like(case.q.shape[:2], torch.float32).to(self.device)
        with m3_sparse.backend(self.name):
            out, lse = cases.call_sparse(m3_sparse.sparse_attention, case, out=out, lse=lse, **options)
        return out.cpu(), lse.cpu()

    def dense(self, case, **options):
        case = moved(case, self.device)
        out = cases.nan_like(case.q.shape, case.q.dtype).to(self.device)
        lse = cases.nan_like(case.q.shape[:2], torch.float32).to(self.device)
        with m3_sparse.backend(self.name):
            out, lse = cases.call_dense(m3_sparse.dense_attention, case, out=out, lse=lse, **options)
        return out.cpu(), lse.cpu()

    def every(self, case, formulations=None, **options):
        """{formulation: (out, lse)}, with "dense" where no selection is involved left to the caller."""
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
        finite = ~want.isinf()
        assert ((scores.double() - want).abs() <= epsilon[..., None])[finite].all()
        counts = oracle.candidates(*lengths.values(), args[2], args[1].shape[1], len(ids))
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
