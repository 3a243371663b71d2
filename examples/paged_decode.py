"""The loop of a small inference engine around the package's functions: paged caches, continuous batching, shared
prefixes, chunked prefill, speculative decoding and CUDA graphs, on a small random model with MiniMax-M3's attention.

    python examples/paged_decode.py                     # on the CPU, the torch backend, half a minute
    python examples/paged_decode.py --device cuda       # 64/4 heads, long prompts, compiled kernels

Prints real tokens a second; --check then runs every request alone and compares.
"""

import argparse
import hashlib
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from kernels import get_local_kernel
from tqdm import tqdm

BUILD = Path(__file__).resolve().parent.parent / "build"
VARIANTS = {"cpu": "torch-cpu", "cuda": "torch-stable-abi211-cu130-x86_64-linux"}
PAGE, DIM, ROTARY = 128, 128, 64
VERIFY = 4  # tokens of a request in a decode step: the last one, and three guesses at those after it


@dataclass
class Settings:
    hidden: int
    heads: int
    kv_heads: int
    layers: int  # the first is dense, as in M3
    vocabulary: int
    topk: int
    requests: int
    prefix: int  # tokens that all prompts begin with
    own: int  # tokens of a prompt behind the prefix, at the most
    new: int  # tokens to generate a request
    batch: int  # requests that decode at once, at the most
    chunk: int  # tokens of a prompt in one prefill
    pages: int


SETTINGS = {
    "cpu": Settings(64, 4, 2, 2, 24, 2, 5, 270, 140, 20, 3, 160, 30),
    "cuda": Settings(2048, 64, 4, 4, 4096, 16, 64, 16000, 4000, 256, 32, 4096, 2560),
}


# ---- the model


class Model:
    """Random weights. What a layer attends to is the business of `memory`: pages, or for --check one request alone."""

    def __init__(self, m3_sparse, settings, device, dtype):
        self.kernels, self.settings = m3_sparse, settings
        s, generator = settings, torch.Generator().manual_seed(0)

        def weight(rows, columns):
            return (torch.randn(rows, columns, generator=generator) / rows**0.5).to(device, dtype)

        # Query heads, K heads, V heads, index queries (one a KV head), one index key.
        self.split = [n * DIM for n in (s.heads, s.kv_heads, s.kv_heads, s.kv_heads, 1)]
        self.embedding = torch.randn(s.vocabulary, s.hidden, generator=generator).to(device, dtype)
        self.layers = [
            {
                "in": weight(s.hidden, sum(self.split)),
                "out": weight(s.heads * DIM, s.hidden),
                "up": weight(s.hidden, 2 * s.hidden),
                "down": weight(2 * s.hidden, s.hidden),
            }
            for _ in range(s.layers)
        ]
        self.head = weight(s.hidden, s.vocabulary)
        self.frequencies = 5e6 ** (-torch.arange(0, ROTARY, 2, device=device) / ROTARY)

    def rotate(self, x, positions):
        """RoPE on the first 64 channels of every head, x [T, heads, 128]."""
        angle = (positions[:, None] * self.frequencies)[:, None]
        cos, sin = angle.cos().repeat(1, 1, 2), angle.sin().repeat(1, 1, 2)
        part, rest = x[..., :ROTARY].float(), x[..., ROTARY:]
        turned = torch.cat([-part[..., ROTARY // 2 :], part[..., : ROTARY // 2]], -1)
        return torch.cat([(part * cos + turned * sin).to(x.dtype), rest], -1)

    def forward(self, tokens, positions, memory):
        """Hidden states [T, hidden] of tokens [T] at these positions, after writing them to memory."""
        x, s = self.embedding[tokens], self.settings
        for i, layer in enumerate(self.layers):
            parts = (F.rms_norm(x, (s.hidden,)) @ layer["in"]).split(self.split, -1)
            q, k, v, index_q, index_k = (p.unflatten(-1, (-1, DIM)) for p in parts)
            q, k, index_q, index_k = (self.rotate(F.rms_norm(p, (DIM,)), positions) for p in (q, k, index_q, index_k))
            k_cache, v_cache, index_k_cache = memory.write(i, k, v, index_k[:, 0])
            if i == 0:
                out = self.kernels.dense_attention(q, k_cache, v_cache, memory.table, **memory.lengths)
            else:
                ids = self.kernels.select_blocks(index_q, index_k_cache, memory.table, topk=s.topk, **memory.lengths)
                out = self.kernels.sparse_attention(q, k_cache, v_cache, ids, memory.table, **memory.lengths)
            x = x + out.flatten(1) @ layer["out"]
            x = x + F.silu(F.rms_norm(x, (s.hidden,)) @ layer["up"]) @ layer["down"]
        return x

    def logits(self, x):
        return (F.rms_norm(x, (x.shape[-1],)) @ self.head).float()


class Paged:
    """A batch over the paged caches: where its tokens go and what its requests consist of."""

    def __init__(self, kernels, caches, slots, table, lengths):
        self.kernels, self.caches = kernels, caches
        self.slots, self.table, self.lengths = slots, table, lengths

    def write(self, layer, k, v, index_k):
        caches = self.caches[layer]
        self.kernels.store_kv(k, v, index_k, *caches, self.slots)
        return caches


class Alone:
    """One request, its keys and values just computed, in one piece: no pages, nothing cached, nothing shared."""

    table = None

    def __init__(self, length, device):
        self.lengths = {
            "cu_seqlens_q": torch.tensor([0, length], dtype=torch.int32, device=device),
            "seqused_k": torch.tensor([length], dtype=torch.int32, device=device),
        }

    def write(self, layer, k, v, index_k):
        return k.transpose(0, 1)[None].contiguous(), v.transpose(0, 1)[None].contiguous(), index_k[None].contiguous()


# ---- pages


class Pages:
    """Which pages are free, in use (counted) or merely remembered: full pages of prompts stay until room is needed.

    A page's key is a digest of the tokens in it and all before it, which are what keys and values depend on.
    """

    def __init__(self, count):
        self.free = list(range(count))
        self.users = [0] * count
        self.by_key, self.keys = {}, {}
        self.unused = OrderedDict()  # remembered pages that nobody uses, the oldest first

    def room(self):
        return len(self.free) + len(self.unused)

    def take(self):
        if self.free:
            page = self.free.pop()
        else:
            page, _ = self.unused.popitem(last=False)
            del self.by_key[self.keys.pop(page)]
        self.users[page] = 1
        return page

    def find(self, key):
        """The page that holds this, now used once more; None if there is none."""
        page = self.by_key.get(key)
        if page is not None:
            self.users[page] += 1
            self.unused.pop(page, None)
        return page

    def remember(self, page, key):
        if key not in self.by_key and page not in self.keys:
            self.by_key[key], self.keys[page] = page, key

    def release(self, page):
        self.users[page] -= 1
        if self.users[page] == 0:
            if page in self.keys:
                self.unused[page] = None
            else:
                self.free.append(page)


# ---- requests and the loop


class Request:
    def __init__(self, prompt, new):
        self.tokens = list(prompt)  # the prompt, then what was generated
        self.prompt, self.end = len(prompt), len(prompt) + new
        self.pages, self.cached = [], 0  # its pages in order, and how many of its tokens they hold
        self.after, self.looked_at = {}, 0  # where the tokens behind a pair of tokens stand, for guesses
        self.keys, key = [], b""
        for first in range(0, len(prompt) - PAGE + 1, PAGE):
            key = hashlib.sha256(key + repr(prompt[first : first + PAGE]).encode()).digest()
            self.keys.append(key)

    def guesses(self):
        """Three tokens that may come next: those that followed the last two where these last stood together before."""
        tokens = self.tokens
        for i in range(self.looked_at, len(tokens) - 2):
            self.after[tokens[i], tokens[i + 1]] = i + 2
        self.looked_at = len(tokens) - 2
        first = self.after.get((tokens[-2], tokens[-1]), len(tokens))
        found = tokens[first : first + VERIFY - 1]
        return found + [0] * (VERIFY - 1 - len(found))


class Engine:
    def __init__(self, model, settings, device, dtype):
        self.model, self.settings, self.device, s = model, settings, device, settings
        self.pages, self.waiting, self.decoding, self.prefilling = Pages(s.pages), deque(), [], None
        shapes = (s.pages, s.kv_heads, PAGE, DIM), (s.pages, s.kv_heads, PAGE, DIM), (s.pages, PAGE, DIM)
        self.caches = [tuple(torch.zeros(x, dtype=dtype, device=device) for x in shapes) for _ in range(s.layers)]
        self.width = -(-(s.prefix + s.own + s.new + VERIFY) // PAGE)  # pages of the longest request
        self.counts = dict.fromkeys(("prefilled", "shared", "generated", "decode steps", "rows"), 0)
        # What a decode step reads. CUDA graphs are recorded over these addresses: the engine holds all of them, since a
        # graph keeps no tensor alive that was made before it.
        self.inputs = {
            "starts": torch.arange(s.batch + 1, dtype=torch.int32, device=device) * VERIFY,
            "tokens": torch.zeros(s.batch * VERIFY, dtype=torch.int64, device=device),
            "positions": torch.zeros(s.batch * VERIFY, dtype=torch.int64, device=device),
            "slots": torch.full((s.batch * VERIFY,), -1, dtype=torch.int64, device=device),
            "table": torch.zeros(s.batch, self.width, dtype=torch.int32, device=device),
            "used": torch.zeros(s.batch, dtype=torch.int32, device=device),
        }
        self.sizes = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n < s.batch] + [s.batch]
        self.steps = {n: self.make_step(n) for n in self.sizes}

    def make_step(self, batch):
        """A decode step of `batch` requests as a function without arguments: on a GPU, the replay of a graph."""
        lengths = {
            "cu_seqlens_q": self.inputs["starts"][: batch + 1],
            "seqused_k": self.inputs["used"][:batch],
        }
        tokens, positions, slots = (self.inputs[n][: batch * VERIFY] for n in ("tokens", "positions", "slots"))
        memory = Paged(self.model.kernels, self.caches, slots, self.inputs["table"][:batch], lengths)

        def step():
            return self.model.logits(self.model.forward(tokens, positions, memory)).argmax(-1)

        if self.device.type != "cuda":
            return step
        # All slots are -1 and all lengths 0 here: warming up and recording write nothing.
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            best = step()

        def replay():
            graph.replay()
            return best

        return replay

    def admit(self):
        """Take the next request if there is room for all it may come to. Its prompt's first pages may be there already."""
        if self.prefilling or not self.waiting or len(self.decoding) >= self.settings.batch:
            return
        request = self.waiting[0]
        # The last token of a prompt is always computed: its logits say which token comes next.
        for i in range((request.prompt - 1) // PAGE):
            page = self.pages.find(request.keys[i])
            if page is None:
                break
            request.pages.append(page)
        needed = -(-(request.end + VERIFY) // PAGE) - len(request.pages)
        if needed > self.pages.room():
            for page in request.pages:
                self.pages.release(page)
            request.pages.clear()
            return
        request.cached = len(request.pages) * PAGE
        self.counts["shared"] += request.cached
        request.pages += [self.pages.take() for _ in range(needed)]
        request.table = torch.zeros(self.width, dtype=torch.int32)
        request.table[: len(request.pages)] = torch.tensor(request.pages)
        self.prefilling = self.waiting.popleft()

    def slots(self, request, first, last):
        return [request.pages[i // PAGE] * PAGE + i % PAGE for i in range(first, last)]

    def prefill(self):
        """One chunk of the prompt at hand; one prompt at a time, so that the next one finds its pages."""
        request = self.prefilling
        first, last = request.cached, min(request.cached + self.settings.chunk, request.prompt)
        tensor = lambda x, dtype=torch.int64: torch.tensor(x, dtype=dtype, device=self.device)
        lengths = {"cu_seqlens_q": tensor([0, last - first], torch.int32), "seqused_k": tensor([last], torch.int32)}
        table = tensor([request.pages], torch.int32)
        memory = Paged(self.model.kernels, self.caches, tensor(self.slots(request, first, last)), table, lengths)
        positions = torch.arange(first, last, device=self.device)
        x = self.model.forward(tensor(request.tokens[first:last]), positions, memory)
        request.cached = last
        self.counts["prefilled"] += last - first
        for i in range(first // PAGE, last // PAGE):
            self.pages.remember(request.pages[i], request.keys[i])
        if last < request.prompt:
            return 0
        request.tokens.append(int(self.model.logits(x[-1:]).argmax()))
        self.decoding.append(request)
        self.prefilling = None
        return 1

    def decode(self):
        """One token or more for every request that decodes: the guesses are checked all at once."""
        batch = self.decoding
        size = next(n for n in self.sizes if n >= len(batch))
        idle = size - len(batch)  # rows without a request: length 0, nothing stored
        tokens, positions, slots, table, used = [], [], [], [], []
        for request in batch:
            first = len(request.tokens) - 1  # the newest token is not in the cache yet
            tokens += [request.tokens[-1], *request.guesses()]
            positions += range(first, first + VERIFY)
            slots += self.slots(request, first, first + VERIFY)
            table.append(request.table)
            used.append(first + VERIFY)
        guessed = tokens
        rows = {
            "tokens": tokens + [0] * idle * VERIFY,
            "positions": positions + [0] * idle * VERIFY,
            "slots": slots + [-1] * idle * VERIFY,
            "used": used + [0] * idle,
        }
        for name, values in rows.items():
            self.inputs[name][: len(values)].copy_(torch.tensor(values))
        self.inputs["table"][: len(table)].copy_(torch.stack(table))
        best = self.steps[size]().tolist()
        made = 0
        for i, request in enumerate(batch):
            offered, found = guessed[i * VERIFY : (i + 1) * VERIFY], best[i * VERIFY : (i + 1) * VERIFY]
            # found[j] follows offered[: j + 1] and counts as long as every guess before it was right. Keys and values
            # of wrong guesses stay behind the request's length until they are overwritten.
            count = 1
            while count < VERIFY and offered[count] == found[count - 1]:
                count += 1
            count = min(count, request.end - len(request.tokens))
            request.tokens += found[:count]
            made += count
        self.counts["decode steps"] += 1
        self.counts["rows"] += len(batch)
        return made

    def run(self, requests):
        self.waiting.extend(requests)
        total = sum(r.end - r.prompt for r in requests)
        with tqdm(total=total, unit=" tokens", smoothing=0.1, mininterval=0.5) as bar:
            while self.waiting or self.prefilling or self.decoding:
                self.admit()
                made = self.prefill() if self.prefilling else 0
                self.finish()
                made += self.decode() if self.decoding else 0
                self.finish()
                self.counts["generated"] += made
                bar.set_postfix(decoding=len(self.decoding), waiting=len(self.waiting), refresh=False)
                bar.update(made)

    def finish(self):
        for request in [r for r in self.decoding if len(r.tokens) >= r.end]:
            for page in request.pages:
                self.pages.release(page)
            self.decoding.remove(request)


def make_requests(s):
    generator = torch.Generator().manual_seed(1)
    draw = lambda n: torch.randint(s.vocabulary, (n,), generator=generator).tolist()
    prefix, requests = draw(s.prefix), []
    for i in range(s.requests):
        prompt = prefix + draw(s.own - i * s.own // (2 * s.requests))
        requests.append(Request(prompt, s.new))
    return requests


def check(model, requests, device):
    """Each request alone, in one forward over prompt and answer: every token must be the best one after those before it,
    which is what generating it alone, token by token, gives. Prints how many are; returns how far below the best logit
    the others' are at the most."""
    differing, worst = 0, 0.0
    for request in requests:
        tokens = torch.tensor(request.tokens, device=device)
        x = model.forward(tokens[:-1], torch.arange(len(tokens) - 1, device=device), Alone(len(tokens) - 1, device))
        logits = model.logits(x[request.prompt - 1 :])
        short = logits.amax(1) - logits.gather(1, tokens[request.prompt :, None])[:, 0]
        differing, worst = differing + int((short > 0).sum()), max(worst, short.max().item())
    total = sum(r.end - r.prompt for r in requests)
    print(f"check: {total - differing} of {total} tokens are those of each request alone", end="")
    print(f"; the others' logits are up to {worst:.3f} below the best" if differing else "")
    return worst


def serve(model, settings, device, dtype):
    engine, requests = Engine(model, settings, device, dtype), make_requests(settings)
    start = time.perf_counter()
    engine.run(requests)
    seconds, c = time.perf_counter() - start, engine.counts
    print(
        f"{settings.requests} requests, {c['generated']} tokens in {seconds:.1f} s: {c['generated'] / seconds:.0f} tokens/s, prompts included\n"
        f"prompts: {c['prefilled']} tokens computed, {c['shared']} found in shared pages\n"
        f"decoding: {c['decode steps']} steps, {(c['generated'] - settings.requests) / c['rows']:.2f} tokens a request and step, "
        f"{VERIFY} verified",
        flush=True,
    )
    return requests


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--variant", type=Path, help="the built variant (default: the one in build/)")
    parser.add_argument("--check", action="store_true", help="compare with every request alone")
    parser.add_argument("--requests", type=int, help="how many, in place of the default")
    options = parser.parse_args()
    m3_sparse = get_local_kernel(options.variant or BUILD / VARIANTS[options.device], backend=options.device)
    device, s = torch.device(options.device), SETTINGS[options.device]
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    s.requests = options.requests or s.requests
    model = Model(m3_sparse, s, device, dtype)
    requests = serve(model, s, device, dtype)
    if not options.check:
        return
    # In fp32 every token is the same. In bf16 the logits of equally good tokens differ by rounding.
    worst, tolerance = check(model, requests, device), 0.0 if dtype == torch.float32 else 0.25
    if not worst <= tolerance:
        raise SystemExit(f"expected logits at most {tolerance} below the best, got {worst:.3f}")


if __name__ == "__main__":
    main()
