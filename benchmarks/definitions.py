"""What the operations compute, in plain torch: the references of the `kernels benchmark` classes.

For uniform batches of one query a request, every page of the table full; attention also for a prompt of one request.
"""

import torch


def scores(index_q, index_k, table):
    """The largest dot product of each row and head with the keys of each block, [requests, heads, blocks]."""
    keys = index_k.float()[table.long()]  # [requests, blocks, 128, 128]
    return torch.einsum("bhd,bnkd->bhnk", index_q.float(), keys).amax(-1)


def selection(index_q, index_k, table, topk):
    """The newest block and the topk - 1 best others of each row and head, ascending."""
    best = scores(index_q, index_k, table)
    best[..., -1] = torch.inf
    return best.topk(topk).indices.sort().values.int()


def attention(q, k, v, table, ids, start=None):
    """Softmax attention of each row over the tokens of its blocks, in q's dtype. One row a request; with `start`, the rows
    are the tokens of the first request from that position on, and none sees a later token."""
    k, v = k.float(), v.float()
    heads = k.shape[1]
    group = q.shape[1] // heads
    out = torch.empty(q.shape, device=q.device)
    for row in range(q.shape[0]):
        for head in range(heads):
            blocks = ids[row, head].long()
            pages = table[row if start is None else 0, blocks].long()
            keys, values = k[pages, head].reshape(-1, 128), v[pages, head].reshape(-1, 128)
            part = slice(head * group, (head + 1) * group)
            logits = q[row, part].float() @ keys.T / 128**0.5
            if start is not None:
                position = (blocks[:, None] * 128 + torch.arange(128, device=q.device)).flatten()
                logits.masked_fill_(position > start + row, -torch.inf)
            out[row, part] = torch.softmax(logits, dim=-1) @ values
    return out.to(q.dtype)


def paged(batch, length, heads, dtype, device):
    """Caches of K, V and index keys with every page used by one request, and the page table."""
    pages = batch * length // 128
    shapes = (pages, heads, 128, 128), (pages, heads, 128, 128), (pages, 128, 128)
    caches = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    return (*caches, torch.randperm(pages, device=device).view(batch, -1).int())


def lengths(batch, length, device):
    """The arguments that say: one query a request, `length` tokens each."""
    return {
        "cu_seqlens_q": torch.arange(batch + 1, device=device, dtype=torch.int32),
        "seqused_k": torch.full((batch,), length, device=device, dtype=torch.int32),
    }
