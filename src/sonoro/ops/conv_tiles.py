"""Tile sizes of convolutions, chosen by their shape and the card: tables by times on an H200 and an H100."""

import math
from dataclasses import dataclass, replace

from sonoro.ops.device import Card

ANY_CARD = Card()
"""A card on which every tile fits."""


@dataclass(frozen=True)
class ConvTile:
    """Tile sizes and launch parameters; a program computes `n` + `extra` outputs, so that 96 and 192 waste none."""

    m: int
    n: int
    extra: int
    k: int
    warps: int
    stages: int

    def stages_on(self, on: Card, input_bytes: int = 2) -> int:
        """How many of the stages fit the card's shared memory, with inputs of `input_bytes` and weights of 2 bytes per
        element; 1 if it has too little memory or registers."""
        if on.has_few_registers and self.m * (self.n + self.extra) > 32 * 32 * self.warps:
            return 1
        stage_bytes = self.k * (input_bytes * self.m + 2 * (self.n + self.extra))
        return on.fit_stages(self.m, stage_bytes, self.stages)


DEEP = (
    (230, ConvTile(256, 128, 0, 64, 8, 4)),
    (120, ConvTile(128, 128, 0, 64, 8, 3)),
    (70, ConvTile(128, 128, 0, 64, 4, 4)),
    (200, ConvTile(64, 64, 0, 64, 4, 5)),
    (90, ConvTile(64, 32, 0, 64, 4, 5)),
    (90, ConvTile(32, 32, 0, 128, 4, 4)),
    (90, ConvTile(16, 32, 0, 128, 2, 5)),
    (0, ConvTile(16, 16, 0, 256, 4, 4)),
)
_SMALL = (
    (60, ConvTile(64, 32, 0, 64, 4, 5)),
    (90, ConvTile(32, 32, 0, 128, 4, 4)),
    (0, ConvTile(16, 32, 0, 128, 2, 5)),
)
SHALLOW = ((200, ConvTile(64, 128, 0, 64, 4, 3)), (120, ConvTile(64, 64, 0, 64, 4, 5)), *_SMALL)
WIDE = ((60, ConvTile(64, 128, 0, 64, 4, 3)), (60, ConvTile(64, 64, 0, 64, 4, 4)), *_SMALL)
"""Tiles in the order they are tried, each with the least number of programs it must give; by times on an H200 in half
precision. Deep: 1024 inputs or more, over all taps. Wide: of float32, which every program narrows by itself; 192 rows
of 512 to 3072 and to 2048 took 15.1 and 12.0 us as shallow ones, 9.2 and 9.1 so (H100)."""
ONE_WAVE = range(90, 133), ConvTile(64, 64, 0, 128, 4, 4)
"""For so many programs this tile is faster than smaller ones: 512 rows of 7 x 768 to 768 took 16.1 us, not 21.5
(H200)."""
NARROW = {
    (96, False): ConvTile(128, 64, 32, 32, 4, 4),
    (96, True): ConvTile(64, 64, 32, 32, 4, 4),
    (192, False): ConvTile(64, 128, 64, 64, 4, 3),
    (192, True): ConvTile(128, 64, 0, 64, 4, 3),
    (288, False): ConvTile(128, 64, 32, 64, 4, 3),
}
"""Tiles for `NARROW_ROWS` rows or more, by outputs and whether there is one tap."""
NARROW_ROWS = {96: 4096, 192: 16384, 288: 4096}
UNEVEN = {
    (1536, 7): (1024, ConvTile(128, 128, 64, 64, 8, 3)),
    (6144, 2): (768, ConvTile(128, 128, 64, 64, 8, 4)),
    (768, 7): (8192, ConvTile(128, 128, 64, 64, 8, 4)),
    (768, 1): (4096, ConvTile(64, 128, 64, 64, 4, 3)),
}
"""By outputs and taps, the least rows and a tile of 192 outputs, where it leaves fewer multiprocessors idle at the end:
by times on an H100 (384 frames of a 12 Hz codec: 93, 138, 205, 58 us with 128 outputs, 78, 120, 182, 52 so)."""


def choose_tile(
    rows: int, outputs: int, channels: int, taps: int, on: Card = ANY_CARD, input_bytes: int = 2
) -> ConvTile:
    """The tile for a product of `rows` columns by `outputs`, over `taps` times `channels` inputs of `input_bytes`
    bytes, that fits the card."""
    least_rows, uneven = UNEVEN.get((outputs, taps), (rows + 1, DEEP[0][1]))
    if (outputs, taps == 1) in NARROW and rows >= NARROW_ROWS[outputs]:
        tile = NARROW[outputs, taps == 1]
    elif rows >= least_rows and uneven.stages_on(on, input_bytes) == uneven.stages:
        tile = uneven
    else:
        table = DEEP if taps * channels >= 1024 or (taps > 1 and outputs < 768) else SHALLOW
        table = WIDE if input_bytes > 2 else table
        fitting = [tile for least, tile in table if _programs(tile, rows, outputs) >= least]
        tile = fitting[0] if fitting else table[-1][1]
        counts, one_wave = ONE_WAVE
        is_small = tile.m * tile.n < one_wave.m * one_wave.n and input_bytes == 2
        if is_small and _programs(one_wave, rows, outputs) in counts:
            tile = one_wave
        if tile.m == 16 and taps > 2:
            tile = replace(tile, warps=4, stages=4)
    fitting_tile: ConvTile | None = replace(tile, k=math.gcd(channels, tile.k))
    while fitting_tile is not None and fitting_tile.stages_on(on, input_bytes) < min(2, fitting_tile.stages):
        fitting_tile = smaller_tile(replace(fitting_tile, stages=2))
    assert fitting_tile is not None
    return replace(fitting_tile, stages=fitting_tile.stages_on(on, input_bytes))


def _programs(tile: ConvTile, rows: int, outputs: int) -> int:
    """How many programs compute `outputs` of `rows` columns; 0 if a quarter or more of their outputs would be wasted,
    or if there are fewer rows than a tile has."""
    programs_n = -(-outputs // tile.n)
    is_wasted = tile.m > max(16, rows) or 4 * outputs <= 3 * programs_n * tile.n
    return 0 if is_wasted else -(-rows // tile.m) * programs_n


def smaller_tile(tile: ConvTile) -> ConvTile | None:
    """The next tile to try if `tile` cannot be launched: fewer stages, then smaller blocks; None after the smallest."""
    if tile.stages > 2:
        return replace(tile, stages=2)
    if tile.extra:
        return replace(tile, extra=0)
    if max(tile.m, tile.n) > 16:
        return replace(tile, m=tile.m // 2) if tile.m >= tile.n else replace(tile, n=tile.n // 2)
    return replace(tile, k=tile.k // 2) if tile.k > 16 else None
