"""Selections to measure prefill with, and how much those of neighbouring tokens overlap.

All give [T, heads, 16] int32 for the tokens at `positions` of one sequence, ascending, then -1, the local block among them.
    random       every token draws the other 15 uniformly: the worst case of a union, and nothing a model does.
    correlated   chains of 128 tokens. A token keeps each block of the token before with probability 0.87; what it lacks it
                 draws from the rest, a block at distance d with weight 1 / (1 + d / 16). Four neighbours then have about
                 22 distinct of their 64 blocks, as published for M3's own selections.
`union(ids, n)` is u(n): n times the distinct blocks of n neighbouring tokens over their selected blocks, 1 if all pick the
same, n if none do. Publish it beside every figure.
"""

import torch

BLOCK, TOPK, KEEP, CHAIN = 128, 16, 0.87, 128


def random(heads, positions, blocks, generator):
    local = positions // BLOCK
    parts, step = [], max(1, (1 << 26) // (blocks * heads))
    order = torch.arange(blocks, device=positions.device)
    for own in local.split(step):
        own = own.view(1, -1, 1)
        score = torch.rand(heads, own.shape[1], blocks, device=positions.device, generator=generator)
        parts.append(largest(score, own, order))
    return ascending(torch.cat(parts, 1))


def correlated(heads, positions, blocks, generator):
    device, count = positions.device, positions.numel()
    length = min(CHAIN, count)
    chains = -(-count // length)
    padded = torch.nn.functional.pad(positions, (0, chains * length - count), value=int(positions[-1]))
    local = (padded // BLOCK).view(chains, length)
    order = torch.arange(blocks, device=device)
    result = torch.empty(heads, chains, length, TOPK, dtype=torch.int32, device=device)
    before = torch.zeros(heads, chains, blocks, dtype=torch.bool, device=device)
    for i in range(length):
        own = local[:, i].view(1, chains, 1)
        noise = torch.rand(heads, chains, blocks, device=device, generator=generator).clamp_(1e-7, 1 - 1e-7)
        score = -torch.log(-torch.log(noise)) - torch.log1p((own - order).clamp(min=0) / 16.0)
        keep = before & (torch.rand(heads, chains, blocks, device=device, generator=generator) < KEEP)
        score = torch.where(keep, score + 1e3, torch.where(before, score - 50.0, score))
        chosen = largest(score, own, order)
        before = torch.zeros_like(before).scatter_(-1, chosen.clamp(min=0).long(), chosen >= 0)
        result[:, :, i] = chosen
    return ascending(result.view(heads, chains * length, TOPK)[:, :count])


def largest(score, local, order):
    """The local block and the best of those before it; -1 where there are none."""
    score = torch.where(order == local, 1e6, torch.where(order > local, -1e9, score))
    value, chosen = score.topk(min(TOPK, order.numel()), -1)
    chosen = torch.where(value < -1e8, -1, chosen).to(torch.int32)
    return torch.nn.functional.pad(chosen, (0, TOPK - chosen.shape[-1]), value=-1)


def ascending(ids):
    """[heads, T, 16] in any order -> [T, heads, 16] ascending, -1 last."""
    last = torch.iinfo(torch.int32).max
    ids = torch.where(ids < 0, last, ids).sort(-1).values
    return torch.where(ids == last, -1, ids).transpose(0, 1).contiguous()


def batch(kind, heads, q_lens, kv_lens, seed=1, device="cuda"):
    """The selections of whole requests, one after the other."""
    generator = torch.Generator(device).manual_seed(seed)
    draw = {"random": random, "correlated": correlated}[kind]
    parts = []
    for q_len, kv_len in zip(q_lens, kv_lens):
        positions = torch.arange(kv_len - q_len, kv_len, device=device)
        parts.append(draw(heads, positions, -(-kv_len // BLOCK), generator))
    return torch.cat(parts)


def union(ids, n):
    """u(n) of one sequence's selections."""
    count = ids.shape[0] // n * n
    if count == 0:
        return float("nan")
    groups = ids[:count].unflatten(0, (-1, n)).transpose(1, 2).flatten(2).sort(-1).values
    first = torch.nn.functional.pad(groups[..., 1:] != groups[..., :-1], (1, 0), value=True)
    return n * int((first & (groups >= 0)).sum()) / max(int((ids[:count] >= 0).sum()), 1)
