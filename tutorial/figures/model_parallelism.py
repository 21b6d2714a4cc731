"""Figures of part 4: model parallelism, pipeline parallelism, tensor parallelism, and a device mesh."""

from picture import DARK, GREY, INK, PALE, RANKS, WHITE, Picture


def model_parallel() -> Picture:
    """Four stages, what they send each other, and a time line on which one rank works at a time."""
    picture = Picture(330)
    for rank, color in enumerate(RANKS):
        x = 40 + rank * 220
        picture.box(x, 30, 160, 62, f"rank {rank}\nlayers {2 * rank}, {2 * rank + 1}", color, size=11)
        if rank < 3:
            picture.arrow((x + 163, 46), (x + 217, 46), color=INK)
            picture.arrow((x + 217, 76), (x + 163, 76), color=GREY)
    picture.text(450, 112, "above: activations, forward      below: gradients, backward", 9.5, GREY)
    for rank, color in enumerate(RANKS):
        y = 142 + rank * 34
        picture.text(96, y + 13, f"rank {rank}", 10, at="right")
        picture.box(110, y, 750, 26, fill=PALE, round=3)
        picture.box(110 + rank * 62.5, y, 60, 26, "F", color, round=3, bold=True)
        picture.box(860 - 125 * (rank + 1), y, 122, 26, "B", color, round=3, bold=True)
    picture.arrow((110, 288), (862, 288), color=GREY)
    picture.text(485, 305, "only one rank computes at a time: the memory of 4 GPUs, the speed of 1", 10)
    return picture


def pipeline() -> Picture:
    """The GPipe schedule of 4 stages and 8 micro-batches, and how the bubble shrinks."""
    picture, ranks, count, cell = Picture(420), 4, 8, 33
    picture.text(450, 26, "GPipe, P = 4 stages, M = 8 micro-batches: 22 ticks, each rank busy for 16", 11.5, bold=True)
    for rank in range(ranks):
        y = 50 + rank * 36
        picture.text(104, y + 15, f"rank {rank}", 10, at="right")
        picture.box(115, y, 22 * cell, 30, fill=PALE, round=3)
        for number in range(count):
            forward, backward = rank + number, 2 * (count + ranks - 1) - 1 - rank - number
            picture.box(115 + forward * cell, y, cell - 2, 30, f"F{number}", RANKS[rank], round=3)
            picture.box(115 + backward * cell, y, cell - 2, 30, f"B{number}", RANKS[rank], round=3, alpha=0.6)
    picture.text(115 + 11 * cell, 66, "bubble", 10, GREY)
    picture.arrow((115, 202), (117 + 22 * cell, 202), color=GREY)
    picture.text(478, 216, "ticks", 9, GREY)

    axes = picture.plot(115, 262, 430, 100, x_label="micro-batches M", y_label="bubble")
    values = [2**exponent for exponent in range(7)]
    for stages, color in ((2, DARK[2]), (4, DARK[0]), (8, DARK[3])):
        axes.plot(
            values, [(stages - 1) / (m + stages - 1) for m in values], "o-", color=color, ms=4, label=f"P = {stages}"
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, values)
    axes.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    axes.legend(frameon=False, fontsize=8.5)
    picture.text(715, 290, r"bubble = $\frac{P - 1}{M + P - 1}$", 17)
    picture.text(715, 345, "M = 1 is naive model parallelism:\nidle for (P - 1)/P of the time", 10, GREY)
    return picture


def tensor_parallel() -> Picture:
    """An MLP and attention, split by columns and then by rows, with f before and g after."""
    picture = Picture(430)
    for top, first, middle, last in (
        (20, ("up", "columns"), "GELU", ("down", "rows")),
        (222, ("qkv", "columns"), "attention\nof its heads", ("out", "rows")),
    ):
        picture.text(54, top + 80, "x", 14, bold=True)
        picture.text(54, top + 100, "on both", 8.5, GREY)
        picture.box(96, top + 62, 36, 36, "f", WHITE, INK, 13, bold=True, round=18)
        for rank, y in ((0, top + 18), (1, top + 96)):
            color, dark = RANKS[rank], DARK[rank]
            picture.arrow((134, top + 76 + 8 * rank), (188, y + 24), color=dark)
            picture.text(212, y - 8, f"rank {rank}", 9, dark, bold=True)
            for part in range(2):
                fill = color if part == rank else PALE
                picture.box(192 + 46 * part, y + 2, 44, 46, fill=fill, edge=WHITE, round=2)
                picture.box(562, y + 2 + 23 * part, 90, 22, fill=fill, edge=WHITE, round=2)
            picture.arrow((286, y + 25), (352, y + 25), color=dark)
            picture.box(356, y + 4, 130, 42, middle, color, size=10)
            picture.arrow((490, y + 25), (556, y + 25), color=dark)
            picture.arrow((656, y + 25), (736, top + 72 + 16 * rank), color=dark)
        picture.text(237, top + 160, f"{first[0]}, split by {first[1]}", 9.5)
        picture.text(607, top + 160, f"{last[0]}, split by {last[1]}", 9.5)
        picture.box(740, top + 62, 36, 36, "g", WHITE, INK, 13, bold=True, round=18)
        picture.arrow((780, top + 80), (818, top + 80))
        picture.text(840, top + 80, "y", 14, bold=True)
        picture.text(840, top + 100, "on both", 8.5, GREY)
    picture.line([30, 870], [206, 206], "#d0d7de", 1)
    note = "f: identity forward, all-reduce backward        g: all-reduce forward, identity backward"
    picture.text(450, 408, note, 10)
    return picture


def two_d() -> Picture:
    """Four ranks as a mesh, what goes along its rows and columns, and what each holds of a matrix."""
    picture = Picture(400)
    for dp in range(2):
        for tp in range(2):
            rank, x, y = 2 * dp + tp, 130 + 270 * tp, 70 + 180 * dp
            picture.box(x, y, 120, 70, f"rank {rank}", RANKS[rank], size=12, bold=True)
        picture.arrow((253, 105 + 180 * dp), (397, 105 + 180 * dp), "tp: activations", width=4, head="<|-|>")
        picture.text(325, 122 + 180 * dp, "all-reduce, 4 per block", 8.5, GREY)
        picture.text(112, 105 + 180 * dp, f"samples\n{4 * dp} to {4 * dp + 3}", 10, at="right")
        picture.arrow((190 + 270 * dp, 144), (190 + 270 * dp, 247), color=INK, head="<|-|>", style="--")
    picture.text(325, 196, "dp: parameters, all-gather\ngradients, reduce-scatter", 9.5)
    picture.text(325, 34, "a mesh of 2 x 2", 12, bold=True)
    picture.text(325, 362, "rows: inside a machine, on the fastest link      columns: may cross machines", 9.5, GREY)

    for top, name, places in (
        (70, "up: columns by tp, then by dp", [(0, 0), (0, 2), (0, 1), (0, 3)]),
        (250, "down: rows by tp, columns by dp", [(0, 0), (1, 0), (0, 1), (1, 1)]),
    ):
        picture.text(730, top - 18, name, 10)
        for rank, (row, column) in enumerate(places):
            wide, high = (45, 84) if top == 70 else (90, 42)
            x, y = 640 + column * wide, top + row * high
            picture.box(x, y, wide - 2, high - 2, f"{rank}", RANKS[rank], round=2, size=11, bold=True)
    picture.text(730, 34, "shards of a matrix", 12, bold=True)
    picture.text(730, 362, "1/4 each", 9.5, GREY)
    return picture
