"""What changes a result's bits and what doesn't, as data: the table in README and the tests
(tests/determinism_checks.py) come from here.

A cell says what is promised when the column's change leaves a row's own inputs as they are: BITWISE, the same bits; WITHIN,
another rounding of the same sums, inside the bound of tests/property_bounds.py; NONE, there is nothing to change.
"""

BITWISE, WITHIN, NONE = "bitwise", "within the bound", "-"

CHANGES = {
    "repeat": "run to run",
    "batch": "batch composition, position",
    "permutation": "order of the requests",
    "pages": "page placement",
    "cut": "splits, chunks",
    "selection": "order of ids, -1, duplicates",
}

# way: (title, cell of each change)
_B, _W, _N = BITWISE, WITHIN, NONE
WAYS = {
    "select/torch": ("block_scores, select_blocks: torch", (_B, _W, _W, _B, _N, _N)),
    "select/decode": ("the same: aot, few rows", (_B, _B, _B, _B, _N, _N)),
    "select/prefill": ("the same: aot, prefill (stored or fused)", (_B, _B, _B, _B, _B, _N)),
    "select/default": ("the same: aot, default", (_B, _W, _B, _B, _N, _N)),
    "sparse/torch": ("sparse_attention: torch", (_B, _W, _W, _B, _N, _B)),
    "sparse/decode": ('the same: aot, formulation="decode"', (_B, _B, _B, _B, _B, _B)),
    "sparse/union": ('the same: aot, formulation="union"', (_B, _B, _B, _B, _N, _B)),
    "sparse/kv_stationary": ('the same: aot, formulation="kv_stationary"', (_B, _B, _B, _B, _B, _W)),
    "sparse/default": ("the same: aot, default", (_B, _W, _B, _B, _N, _W)),
    "dense/torch": ("dense_attention: torch", (_B, _W, _W, _B, _N, _N)),
    "dense/one split": ("the same: aot, one split", (_B, _B, _B, _B, _N, _N)),
    "dense/default": ("the same: aot, splits by shape", (_B, _W, _B, _B, _W, _N)),
    "store/torch": ("store_kv: torch", (_B, _B, _B, _B, _N, _N)),
    "store/aot": ("the same: aot", (_B, _B, _B, _B, _N, _N)),
    "merge/torch": ("merge_states: torch", (_B, _B, _B, _N, _N, _N)),
    "merge/aot": ("the same: aot", (_B, _B, _B, _N, _N, _N)),
}
CELLS = {(way, change): cell for way, (_, row) in WAYS.items() for change, cell in zip(CHANGES, row)}


MARKS = {BITWISE: "=", WITHIN: "~", NONE: ""}


def markdown() -> str:
    """With the marks that README explains."""
    rows = [["operation", *CHANGES.values()], ["---", *[":-:"] * len(CHANGES)]]
    rows += [[title, *(MARKS[cell] for cell in row)] for title, row in WAYS.values()]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
