"""How many classes a backward pass recomputes at a time: slabs that a budget of memory holds."""

import torch


BUDGET = 2**28  # bytes beyond the gradients, unless the caller says
TERMS = 40  # bytes of a token: six terms, and four numbers that forward kept


def beside_dz(
    n_features: int,  # H
    tiles_n: int,  # tiles of tokens
    dtype: torch.dtype,  # of the products
    needs: tuple[bool, bool, bool],  # gradients of x, w, b
) -> int:  # bytes
    "What a class of a slab holds beside its dz: partial sums of db; in fp16 its dw in fp32."
    return 4 * tiles_n * needs[2] + 4 * n_features * (needs[1] and dtype == torch.float16)


def slab_tiles(
    n_tokens: int,  # N
    n_features: int,  # H
    budget: int,  # bytes beyond the gradients; 0 for our own choice
    tiles_n: int,  # tiles in a column
    tiles_v: int,  # tiles in a row
    class_tile: int,  # BV
    programs: int,
    held: int = 0,  # bytes beside the slab
    beside: int = 0,  # bytes of each class of it beside dz
) -> int:  # tiles
    "Tiles of a slab: what the budget holds, at least two, cut where a round of programs ends."
    held += n_tokens * (TERMS + 4 * n_features)  # x without ignored tokens; dx: a float32 where 16 bits will be
    each = 2 * max(n_tokens, 1) + beside
    fit = ((budget or BUDGET) - held) // (each * class_tile)
    most = min(tiles_v, max(2 if budget else 16, fit))
    if most == tiles_v:
        return tiles_v
    rounds = lambda tiles: -(-tiles * tiles_n // programs)
    fill = lambda tiles: round(tiles * tiles_n / max(1, rounds(tiles) * programs), 2)
    return max(range(most - most // 4, most + 1), key=lambda tiles: (fill(tiles), tiles))


def slab_slices(
    n_classes: int,  # V
    slab: int,  # classes that the budget holds
    class_tile: int,  # BV
    n_tokens: int,  # N
    n_features: int,  # H; 0: dz may not stand in dw
) -> list[slice]:
    "Slabs of classes: as many as the rows of dw after a slab have room for, or as the budget holds."
    found, begin = [], 0
    while begin < n_classes:
        room = (n_classes - begin) * n_features // max(n_tokens + n_features, 1) // class_tile * class_tile
        found.append(slice(begin, min(begin + max(slab, room), n_classes)))
        begin = found[-1].stop
    return found
