"""Figures of part 3: memory, mixed precision, micro-batches, activation checkpointing, ZeRO, CPU offload."""

import math

from picture import BAD, DARK, GREY, INK, PALE, RANKS, WHITE, Picture

KINDS = ("parameters", "gradients", "optimizer state", "activations")


def memory() -> Picture:
    """What a step holds at each moment, with SGD and with Adam."""
    picture = Picture(360)
    phases = ["built", "forward 1", "backward 1", "step 1", "forward 2", "backward 2", "step 2"]
    for number, (title, state) in enumerate((("SGD", 0), ("Adam", 2))):
        axes = picture.plot(
            75 + 425 * number, 52, 370, 225, title, y_label="times the parameters" if not number else ""
        )
        bottom = [0.0] * 7
        for kind, color, values in zip(
            KINDS,
            RANKS,
            ([1] * 7, [0, 0, 1, 1, 0, 1, 1], [0, 0, 0] + [state] * 4, [0, 2, 0, 0, 2, 0, 0]),
            strict=True,
        ):
            axes.bar(range(7), values, 0.92, bottom=bottom, color=color, label=kind)
            bottom = [low + value for low, value in zip(bottom, values, strict=True)]
        axes.set_ylim(0, 5.4)
        axes.set_xticks(range(7), [phase.replace(" ", "\n") for phase in phases], size=7)
    for number, (kind, color) in enumerate(zip(KINDS, RANKS, strict=True)):
        picture.box(150 + 170 * number, 324, 14, 14, fill=color, round=2)
        picture.text(170 + 170 * number, 331, kind, 9.5, at="left")
    return picture


def amp() -> Picture:
    """The gradients of a step on the scale of powers of two, and what each format can hold."""
    picture = Picture(400)
    picture.text(450, 26, "gradients by magnitude, and the range of 16-bit formats", 12, bold=True)
    x = lambda power: 60 + (power + 44) * 780 / 64  # noqa: E731
    for center, color, alpha in ((-31, BAD, 0.55), (-15, DARK[2], 0.75)):
        for step in range(-6, 7):
            high = 150 * math.exp(-((step / 2.6) ** 2))
            picture.box(x(center + step) - 5, 240 - high, 10, high, fill=color, round=0, alpha=alpha)
    picture.arrow((x(-31), 82), (x(-15), 82), "x 65536 = 2 to the 16: loss scaling", bend=-0.2, shift=(0, -28), size=10)
    picture.text(x(-37), 140, "lost in fp16", 10, BAD, at="right", bold=True)
    picture.line([x(-24), x(-24)], [60, 330], GREY, 1.2, "--")
    picture.line([50, 850], [241, 241], INK)
    for power in range(-40, 21, 10):
        picture.text(x(power), 256, f"$2^{{{power}}}$", 10)
    for top, name, low, high, color in (
        (276, "fp32 and bf16: from 1e-38 (and below) to 3e38, outside this plot", -44, 20, RANKS[0]),
        (310, "fp16: from 6e-8 to 65504", -24, 16, RANKS[2]),
    ):
        picture.box(x(low), top, x(high) - x(low), 28, name, color)
    picture.text(x(-34), 324, "fp16: becomes 0", 10, BAD)
    note = "bf16: 8 bits of exponent, 8 of precision      fp16: 5 of exponent, 11 of precision, hence the scale"
    picture.text(450, 368, note, 9.5, GREY)
    return picture


def grad_accumulation() -> Picture:
    """Even and uneven micro-batches and their weights, and all-reduces with and without no_sync."""
    picture = Picture(450)
    picture.box(60, 26, 780, 30, "one batch of B = 32 images: every image has weight 1/32", RANKS[0], size=10.5)
    for top, sizes in ((72, (8, 8, 8, 8)), (136, (14, 14, 3, 1))):
        start = 60
        for size in sizes:
            width = size * 780 / 32
            heavy = size < 8
            words = f"{size} images" if size > 3 else f"{size}"
            picture.box(start, top, width - 3, 30, words, "#f4b6bd" if heavy else RANKS[2], round=3)
            weight = f"1/(4 x {size})" if size > 1 else "1/4"
            picture.text(start + width / 2 - 1, top + 41, weight, 8.5, BAD if heavy else GREY)
            start += width
    picture.text(450, 200, "mean of means: correct above, wrong below; sum / 32 is correct for both", 10)
    picture.line([30, 870], [222, 222], "#d0d7de", 1)
    for top, title, synced in ((240, "DDP", (0, 1, 2, 3)), (340, "DDP,\nno_sync", (3,))):
        picture.text(100, top + 38, title, 10.5, at="right", bold=True)
        for rank in range(2):
            start = 120
            for micro in range(4):
                y = top + 44 * rank
                picture.box(start, y, 44, 32, "F", RANKS[rank], round=3)
                picture.box(start + 46, y, 66, 32, "B", RANKS[rank], round=3, alpha=0.7)
                start += 114
                if micro in synced:
                    if rank == 0:
                        picture.box(start, top, 58, 76, "all-\nreduce", "#d0d7de", round=3, size=9)
                    start += 60
            picture.box(start, top + 44 * rank, 44, 32, "step", PALE, INK, round=3, size=9)
    return picture


def activation_checkpointing() -> Picture:
    """What a checkpointed model keeps, and the peak over the number of segments."""
    picture, blocks, segment = Picture(400), 32, 4
    picture.text(450, 28, "32 blocks in 8 segments: the backward pass is at segment 5", 11.5, bold=True)
    for block in range(blocks):
        x = 46 + 25.6 * block
        inside = block // segment == 5
        kept = block % segment == 0
        done = block // segment > 5
        fill = DARK[0] if kept and not done else (RANKS[1] if inside else WHITE)
        edge = "#d0d7de" if done else (DARK[1] if inside and not kept else DARK[0] if kept else GREY)
        picture.box(x, 86, 16, 16, fill=fill, edge=edge, round=8)
    for number in range(8):
        x = 40 + 102.4 * number
        picture.line([x + 2, x + 96], [114, 114], DARK[0] if number < 5 else DARK[1] if number == 5 else "#d0d7de", 2)
        picture.text(x + 49, 126, f"{number}", 9, GREY)
    picture.arrow((556, 80), (648, 80), "recompute", bend=-0.35, color=DARK[1], shift=(0, -25), size=10)
    picture.arrow((852, 146), (660, 146), "backward", color=GREY, shift=(0, 12), size=10)
    legend = (
        (DARK[0], DARK[0], "saved: inputs of segments"),
        (WHITE, GREY, "dropped"),
        (RANKS[1], DARK[1], "recomputed"),
    )
    for number, (fill, edge, words) in enumerate(legend):
        picture.box(52, 198 + 34 * number, 16, 16, fill=fill, edge=edge, round=8)
        picture.text(78, 206 + 34 * number, words, 10, at="left")
    picture.text(52, 320, "cost: one more forward pass,\n4 forward passes of compute instead of 3", 10, at="left")

    axes = picture.plot(480, 206, 370, 130, x_label="segments k", y_label="values saved")
    inside, numbers = 11, [1, 2, 4, 8, 16, 32]
    axes.plot(numbers, [k + inside * blocks / k for k in numbers], "o-", color=DARK[0], ms=5)
    best = math.sqrt(inside * blocks)
    axes.axvline(best, color=BAD, ls="--", lw=1)
    axes.text(best * 0.94, 260, r"least at $\sqrt{cL}$", color=BAD, ha="right", size=10)
    axes.text(1.25, 330, "k + cL/k", size=10, color=DARK[0])
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, numbers)
    return picture


def zero() -> Picture:
    """What each rank holds in DDP and in the three stages."""
    picture, size = Picture(420), 4
    stages = (
        ("DDP", (), "4", "all-reduce of gradients"),
        ("stage 1", (2,), "2 + 2/N", "reduce-scatter,\nall-gather of parameters"),
        ("stage 2", (1, 2), "1 + 3/N", "gradients to the\nowner at once"),
        ("stage 3", (0, 1, 2), "4/N", "parameters gathered\nlayer by layer"),
    )
    heights = (46, 46, 92)
    for number, (name, cut, total, note) in enumerate(stages):
        left = 130 + 188 * number
        picture.text(left + 78, 30, name, 12, bold=True)
        for rank in range(size):
            x, y = left + 40 * rank, 66
            picture.text(x + 17, 54, f"{rank}", 9, GREY)
            for kind, height in enumerate(heights):
                if kind in cut:
                    picture.box(x, y, 34, height, fill=WHITE, edge="#d0d7de", round=2)
                    part = height / size
                    picture.box(x, y + part * rank, 34, part, fill=RANKS[kind], round=0)
                else:
                    picture.box(x, y, 34, height, fill=RANKS[kind], round=2)
                y += height + 8
        picture.text(left + 78, 292, total, 15, bold=True)
        picture.text(left + 78, 332, note, 9, GREY)
    for kind, (y, words) in enumerate(((89, "parameters"), (143, "gradients"), (220, "Adam's state"))):
        picture.text(112, y, words, 10, DARK[kind], at="right", bold=True)
    picture.text(112, 292, "memory", 9.5, at="right")
    picture.text(
        450,
        384,
        "filled: stored on the rank      outlined: on other ranks      1 = the size of the parameters",
        9.5,
        GREY,
    )
    return picture


def cpu_offload() -> Picture:
    """A GPU with two layers, a host with all layers, and copies that run ahead of the computation."""
    picture, layers = Picture(440), 6
    picture.box(50, 24, 230, 100, fill=PALE)
    picture.text(165, 42, "GPU", 11, bold=True)
    for number in (1, 2):
        picture.box(80 + 90 * (number - 1), 62, 80, 44, f"layer {number}", RANKS[number % 4])
    picture.box(420, 24, 430, 100, fill=PALE)
    picture.text(635, 42, "host", 11, bold=True)
    for number in range(layers):
        picture.box(436 + 67 * number, 58, 62, 26, f"layer {number}", RANKS[number % 4], size=8.5)
        picture.box(436 + 67 * number, 88, 62, 26, "Adam", WHITE, RANKS[number % 4], size=8.5)
    picture.arrow((416, 62), (284, 62), "parameters")
    picture.arrow((284, 96), (416, 96), "gradients", shift=(0, 11))
    for top, title, order in ((160, "forward", range(layers)), (290, "backward", reversed(range(layers)))):
        picture.text(450, top, title, 11, bold=True)
        for row, name in ((0, "copies"), (1, "compute")):
            picture.text(118, top + 34 + 44 * row, name, 10, at="right")
            picture.line([128, 860], [top + 52 + 44 * row, top + 52 + 44 * row], "#d0d7de", 1)
        for place, number in enumerate(order):
            x, color = 134 + 103 * place, RANKS[number % 4]
            picture.box(x, top + 18, 98, 30, f"fetch {number}", color, round=3)
            picture.box(x + 103, top + 62, 98, 30, f"run {number}", color, round=3, alpha=0.7)
    picture.text(450, 416, "while a layer runs, the next one is fetched: copies overlap with compute", 10, GREY)
    return picture
