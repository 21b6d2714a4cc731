"""Figures of part 1: messages, the store, collectives, the ring, and the parameter server."""

import math

from picture import BAD, DARK, GREY, INK, PALE, RANKS, WHITE, Picture


def p2p() -> Picture:
    """Two time lines: a ball that goes there and back, and two sends that wait for each other."""
    picture = Picture(330)
    picture.line([450, 450], [24, 306], "#d0d7de", 1)
    for left, title in ((0, "ping-pong"), (440, "both send first")):
        picture.text(left + 240, 32, title, 12, bold=True)
        for rank, y in ((0, 85), (1, 185)):
            picture.text(left + 84, y, f"rank {rank}", 10, DARK[rank], at="right", bold=True)
            picture.line([left + 96, left + 420], [y, y], RANKS[rank], 3)
    for x, y, words, color in ((130, 85, "0", 0), (270, 185, "1", 1), (400, 85, "3", 0)):
        picture.box(x - 14, y - 14, 28, 28, words, RANKS[color], INK, round=14, bold=True)
    picture.arrow((142, 99), (256, 174), "+ 1", shift=(16, -10), size=11)
    picture.arrow((283, 174), (389, 99), "+ 2", shift=(-18, -10), size=11)
    picture.text(255, 246, "each send matches a recv.\nvalue 3 = 0 + 1 + 2: changed on both ranks.", 9.5, GREY)

    for rank, y, tip in ((0, 85, 122), (1, 185, 148)):
        picture.box(548, y - 14, 64, 28, "send", RANKS[rank], bold=True)
        picture.box(790, y - 14, 64, 28, "recv", WHITE, GREY, color=GREY)
        picture.arrow((580, y + (17 if rank == 0 else -17)), (580, tip), color=BAD)
    picture.text(722, 135, "deadlock: each rank waits for a recv\nthat comes after the send", 10, BAD, bold=True)
    picture.box(478, 222, 390, 82, fill=PALE)
    picture.text(673, 243, "batch_isend_irecv submits all four, then waits", 9.5)
    for rank, y in ((0, 266), (1, 290)):
        for x, words in ((500, "isend"), (760, "irecv")):
            picture.box(x, y - 10, 84, 20, words, RANKS[rank], size=9)
    picture.arrow((588, 266), (756, 290), color=DARK[0])
    picture.arrow((588, 290), (756, 266), color=DARK[1])
    return picture


def store() -> Picture:
    """A table of keys and values between three ranks, and a barrier that the last to come opens."""
    picture = Picture(400)
    rows = [
        ("hello", "from rank 0"),
        ("added", "600"),
        ("timed/count", "3"),
        ("timed/done", "1"),
        ("incomplete/0", "here"),
        ("incomplete/1", "here"),
    ]
    picture.text(450, 28, "TCPStore: one server process, all ranks are clients", 12, bold=True)
    for number, (key, value) in enumerate(rows):
        picture.box(330, 46 + 26 * number, 110, 24, key, PALE, round=2)
        picture.box(442, 46 + 26 * number, 130, 24, value, "#f6f8fa", round=2)
    for rank, x, y in ((0, 60, 64), (1, 60, 150), (2, 750, 100)):
        picture.box(x, y, 90, 40, f"rank {rank}", RANKS[rank], size=11, bold=True)
    picture.arrow((153, 84), (326, 58), "set(hello)", color=DARK[0], shift=(0, -15))
    picture.arrow((326, 84), (153, 166), "add(added, 1) = 600", color=DARK[1], shift=(22, 44), head="<|-|>")
    picture.arrow((576, 58), (747, 108), "get(hello)", color=DARK[2], shift=(20, -14))
    picture.arrow((747, 128), (576, 136), "wait(timed/done)", color=DARK[2], shift=(10, 16))
    picture.line([30, 870], [224, 224], "#d0d7de", 1)
    picture.text(
        450, 246, "barrier by hand: add 1 to timed/count; the last rank sets timed/done, the others wait for it", 10.5
    )
    for rank, came in enumerate((330, 620, 470)):
        y = 268 + 32 * rank
        picture.text(124, y + 12, f"rank {rank}", 10, at="right")
        picture.box(136, y, came - 136, 24, "busy", RANKS[rank], round=3, size=9)
        if came < 620:
            picture.box(came, y, 620 - came, 24, "waits", PALE, round=3, size=9, color=GREY)
        picture.box(622, y, 230, 24, "continues", RANKS[rank], round=3, size=9, alpha=0.6)
    picture.line([621, 621], [260, 366], BAD, 2)
    picture.text(621, 380, "last rank arrived: timed/done", 9.5, BAD)
    return picture


def collectives() -> Picture:
    """Before and after of nine collectives on four ranks."""
    picture, every = Picture(478), range(4)
    row, column, table = (lambda r, c: r == 0), (lambda r, c: c == 0), (lambda r, c: True)
    plain, transposed = (lambda r, c: (r, c)), (lambda r, c: (c, r))
    first, total, pair = (lambda r, c: (0, c)), (lambda r, c: (4, c)), (lambda r, c: (5 + r // 2, c))
    operations = {
        "broadcast": (row, plain, table, first),
        "scatter": (row, plain, column, lambda r, c: (0, r)),
        "gather": (column, plain, row, lambda r, c: (c, 0)),
        "reduce": (table, plain, row, total),
        "reduce_scatter": (table, plain, column, lambda r, c: (4, r)),
        "all_gather": (column, plain, table, lambda r, c: (c, 0)),
        "all_reduce": (table, plain, table, total),
        "all_to_all": (table, plain, table, transposed),
        "all_reduce in two groups": (table, plain, table, pair),
    }
    names, fills = ("a", "b", "c", "d", "Σ", "ab", "cd"), (*RANKS, "#d0d7de", "#d0d7de", "#d0d7de")
    for number, (title, (has, before, gets, after)) in enumerate(operations.items()):
        left, top = 30 + 290 * (number % 3), 46 + 152 * (number // 3)
        picture.text(left + 130, top - 14, title, 10.5, bold=True)
        for x, filled, content in ((left, has, before), (left + 146, gets, after)):
            picture.box(x - 2, top - 2, 116, 108, fill=PALE, round=3)
            for r in every:
                for c in every:
                    if filled(r, c):
                        who, part = content(r, c)
                        words = f"{names[who]}{part + 1}"
                        picture.box(x + 28 * c, top + 26 * r, 27, 25, words, fills[who], round=0, size=8.5)
        picture.arrow((left + 117, top + 52), (left + 142, top + 52))
    return picture


def ring_all_reduce() -> Picture:
    """What four ranks hold after each step of the ring, and what the busiest rank sends."""
    picture, size, letters = Picture(430), 4, "abcd"
    held = [[{rank} for _ in range(size)] for rank in range(size)]
    picture.text(316, 24, "reduce-scatter: pass on a partial sum and add", 10.5, bold=True)
    picture.text(710, 24, "all-gather: pass on a complete chunk", 10.5, bold=True)
    for step in range(2 * size - 1):
        left = 66 + 119 * step
        picture.text(left + 52, 46, f"step {step}" if step else "start", 9, GREY)
        for rank in range(size):
            if step == 0:
                picture.text(54, 70 + 28 * rank, f"rank {rank}", 9, at="right")
            for chunk in range(size):
                who = held[rank][chunk]
                fill = RANKS[chunk] if len(who) == size else PALE
                words = "".join(letters[number] for number in sorted(who))
                edge = (
                    RANKS[chunk] if (rank - chunk) % size == (step if step < size else step - size) and step else None
                )
                picture.box(left + 27 * chunk, 58 + 28 * rank, 25, 24, words, fill, edge, size=7, round=0)
        arrived = {}
        for rank in range(size):
            chunk = (rank - step) % size if step < size - 1 else (rank + 1 - (step - size + 1)) % size
            arrived[(rank + 1) % size, chunk] = held[rank][chunk] | held[(rank + 1) % size][chunk]
        for (rank, chunk), who in arrived.items():
            held[rank][chunk] = who

    for rank, (x, y) in enumerate(((130, 232), (220, 300), (130, 368), (40, 300))):
        picture.box(x - 4, y - 14, 60, 30, f"rank {rank}", RANKS[rank], size=9.5, round=12)
    for start, stop in (
        ((190, 232), (250, 282)),
        ((250, 320), (190, 368)),
        ((122, 368), (66, 320)),
        ((66, 282), (122, 232)),
    ):
        picture.arrow(start, stop, bend=-0.25, color=GREY)
    axes = picture.plot(390, 226, 470, 150, "tensors sent by the busiest rank", "ranks N")
    numbers = [2**exponent for exponent in range(1, 7)]
    for place, (name, sends, color) in enumerate(
        (
            ("naive: N - 1", lambda n: n - 1, BAD),
            ("tree: log2 N", math.log2, DARK[3]),
            ("ring: 2(N - 1)/N", lambda n: 2 * (n - 1) / n, DARK[0]),
        )
    ):
        axes.bar([k + 0.27 * (place - 1) for k in range(6)], [sends(n) for n in numbers], 0.25, color=color, label=name)
    axes.set_yscale("log", base=2)
    axes.set_yticks([1, 2, 8, 32], [1, 2, 8, 32])
    axes.set_ylim(0.5, 80)
    axes.set_xticks(range(6), numbers)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    return picture


def parameter_server() -> Picture:
    """A server and its workers, a stale gradient, and the load of the busiest link."""
    picture = Picture(400)
    picture.box(200, 26, 150, 44, "server: weights", PALE, GREY, size=10.5, bold=True)
    for rank in (1, 2, 3):
        x = 50 + 175 * (rank - 1)
        picture.box(x, 136, 100, 40, f"worker {rank}", RANKS[rank], size=10.5)
        middle = 275 + 30 * (rank - 2)
        picture.arrow((middle - 8, 74), (x + 42, 132), color=GREY)
        picture.arrow((x + 58, 132), (middle + 8, 74), color=DARK[rank])
    picture.text(60, 96, "pull weights", 9.5, GREY)
    picture.text(500, 96, "push gradients", 9.5)
    y = 240
    picture.text(275, 212, "asynchronous: the weights change meanwhile", 10.5, bold=True)
    picture.arrow((40, y), (520, y), color=GREY)
    for number, version in enumerate((3, 4, 5, 6, 7, 8)):
        x = 66 + 82 * number
        picture.line([x, x], [y - 6, y + 6], GREY)
        picture.text(x, y + 20, f"v{version}", 10, bold=version in (4, 7))
    picture.arrow((148, y + 34), (394, y + 34), color=DARK[1], bend=0.25, width=2)
    picture.text(271, 330, "a gradient of v4 is applied to v7: staleness 3", 10, DARK[1])
    picture.text(275, 366, "W workers: mean staleness W - 1", 10, GREY)

    axes = picture.plot(620, 70, 240, 250, "tensors over the busiest link", "workers W")
    workers = range(1, 17)
    axes.plot(workers, [2 * w for w in workers], color=BAD, lw=2)
    axes.plot(workers, [4 * (w - 1) / w for w in workers], color=DARK[0], lw=2)
    axes.text(9.5, 24, "server: 2W", color=BAD, ha="right", size=10)
    axes.text(16, 5.5, "ring: below 4", color=DARK[0], ha="right", size=10)
    axes.set_xticks([1, 4, 8, 12, 16])
    return picture
