"""Figures of part 2: the training loop, its parallel versions, DDP hooks, elastic training, SyncBN."""

from picture import BAD, DARK, GREY, INK, PALE, RANKS, WHITE, Picture


def snsc() -> Picture:
    """The training loop on one GPU."""
    picture = Picture(260)
    picture.box(40, 24, 820, 212, fill="#f6f8fa", edge="#d0d7de", round=10)
    picture.text(64, 46, "one process, one GPU", 10.5, GREY, at="left")
    steps = ("batch of 32", "forward", "loss", "backward", "step")
    for number, words in enumerate(steps):
        x = 72 + 156 * number
        picture.box(x, 84, 120, 52, words, RANKS[0] if number else PALE, size=11.5, bold=True)
        if number:
            picture.arrow((x - 33, 110), (x - 3, 110))
    picture.arrow(
        (756, 140), (132, 140), "next batch, with new weights", bend=-0.22, color=GREY, shift=(0, 52), size=10
    )
    return picture


def snmc_dp() -> Picture:
    """Card 0 as the hub of DataParallel, and the ring of DDP."""
    picture = Picture(370)
    picture.text(225, 32, "DataParallel: GPU 0 is the center", 12, bold=True)
    picture.box(180, 62, 90, 50, "GPU 0", RANKS[0], INK, size=11, bold=True)
    for gpu, x in ((1, 50), (2, 180), (3, 310)):
        picture.box(x, 210, 90, 50, f"GPU {gpu}", RANKS[gpu], size=11, bold=True)
        middle = 225 + 22 * (gpu - 2)
        picture.arrow((middle - 6, 116), (x + 38, 206), color=GREY)
        picture.arrow((x + 54, 206), (middle + 8, 116), color=DARK[gpu])
    picture.text(96, 140, "weights out", 9.5, GREY)
    picture.text(358, 140, "gradients in", 9.5)
    picture.text(225, 302, "one copy per GPU: 2(N - 1) x weights", 11, BAD, bold=True)
    picture.text(225, 326, "one process, N threads, one Python lock", 9.5, GREY)
    picture.line([450, 450], [30, 340], "#d0d7de", 1)
    picture.text(675, 32, "DDP: a ring", 12, bold=True)
    for gpu, (x, y) in enumerate(((675, 86), (790, 162), (675, 238), (560, 162))):
        picture.box(x - 45, y - 25, 90, 50, f"GPU {gpu}", RANKS[gpu], size=11, bold=True)
    for start, stop in (
        ((723, 86), (790, 133)),
        ((790, 191), (723, 238)),
        ((627, 238), (560, 191)),
        ((560, 133), (627, 86)),
    ):
        picture.arrow(start, stop, bend=-0.25, color=INK)
    picture.text(675, 302, "each GPU: 4(N - 1)/N x weights, less than 4", 11, DARK[2], bold=True)
    picture.text(675, 326, "N processes", 9.5, GREY)
    return picture


def mnmc_ddp_launch() -> Picture:
    """A launcher on each node, its processes, what it tells them, and the all-reduce between them."""
    picture = Picture(400)
    for node in range(2):
        left = 40 + 430 * node
        picture.box(left, 24, 390, 260, fill="#f6f8fa", edge="#d0d7de", round=10)
        picture.text(left + 195, 44, f"node {node}", 11, GREY)
        picture.box(left + 105, 62, 180, 40, f"torchrun --node_rank={node}", PALE, GREY, size=10)
        for local in range(2):
            rank, x = 2 * node + local, left + 30 + 180 * local
            picture.arrow((left + 165 + 60 * local, 106), (x + 75, 132), color=GREY)
            words = f"RANK={rank}\nLOCAL_RANK={local}\nWORLD_SIZE=4"
            picture.box(x, 136, 150, 76, words, RANKS[rank], size=9.5)
            picture.box(x + 30, 228, 90, 34, f"GPU {local}", WHITE, DARK[rank], size=10)
            picture.arrow((x + 75, 214), (x + 75, 226), color=DARK[rank], head="-")
    picture.box(70, 304, 760, 34, "backward(): all-reduce of the gradients; replicas stay equal", "#d0d7de", size=10.5)
    for x in (145, 325, 575, 755):
        picture.arrow((x, 266), (x, 301), head="<|-|>")
    note = "MASTER_ADDR and MASTER_PORT are equal for all processes; image i goes to rank i mod 4"
    picture.text(450, 366, note, 9.5, GREY)
    return picture


def mnmc_ddp_mp() -> Picture:
    """A parent that holds the store, and the children that it spawns and numbers."""
    picture = Picture(340)
    for node in range(2):
        left = 40 + 430 * node
        picture.box(left, 24, 390, 216, fill="#f6f8fa", edge="#d0d7de", round=10)
        picture.text(left + 52, 44, f"node {node}", 11, GREY)
        words = "parent: spawn, host the store" if node == 0 else "parent: spawn"
        picture.box(left + 75, 58, 240, 40, words, PALE, GREY, size=10)
        for local in range(2):
            rank, x = 2 * node + local, left + 30 + 180 * local
            picture.arrow((left + 165 + 60 * local, 102), (x + 75, 140), color=GREY)
            picture.box(
                x, 144, 150, 70, f"main({local}, args)\nrank {node} x 2 + {local} = {rank}", RANKS[rank], size=10
            )
    picture.text(235, 122, "spawn", 9, GREY)
    picture.text(665, 122, "spawn", 9, GREY)
    picture.text(450, 266, "rank = node x processes per node + local rank", 11, bold=True)
    picture.text(
        450, 300, "every child connects to the TCPStore on node 0 and reads the addresses of the others", 10, GREY
    )
    return picture


def mnmc_ddp_slurm() -> Picture:
    """What srun gives each task, and what the tasks work out themselves."""
    picture = Picture(360)
    picture.box(330, 22, 240, 40, "srun -N 2 -n 4", PALE, GREY, size=12, bold=True)
    for rank in range(4):
        x = 50 + 208 * rank
        picture.arrow((420 + 20 * rank, 66), (x + 88, 98), color=GREY)
        words = f"SLURM_PROCID={rank}\nSLURM_LOCALID={rank % 2}\nSLURM_NTASKS=4"
        picture.box(x, 102, 176, 76, words, RANKS[rank], size=10)
    for node in range(2):
        picture.line([50 + 416 * node, 434 + 416 * node], [192, 192], GREY)
        picture.text(242 + 416 * node, 208, f"node{node + 1}", 10.5, GREY)
    picture.text(450, 244, "every task derives the missing values without communication:", 10.5, bold=True)
    picture.box(70, 266, 370, 60, "address: first host of\nscontrol show hostnames  ->  node1", WHITE, DARK[0], size=10)
    picture.box(460, 266, 370, 60, "port: from the job ID\n20000 + SLURM_JOB_ID % 10000", WHITE, DARK[1], size=10)
    return picture


def imagenet() -> Picture:
    """A run of two processes that stops, and one of four that resumes from the checkpoint."""
    picture = Picture(340)
    for rank in range(4):
        y = 50 + 40 * rank
        picture.text(104, y + 15, f"rank {rank}", 10, at="right")
        for epoch in range(3):
            if epoch == 2 or rank < 2:
                x = 116 + 240 * epoch + (40 if epoch == 2 else 0)
                picture.box(x, y, 228, 30, f"epoch {epoch + 1}", RANKS[rank], round=3)
    picture.text(352, 30, "2 processes, torchrun or srun", 10.5, bold=True)
    picture.text(750, 30, "4 processes", 10.5, bold=True)
    picture.line([612, 612], [40, 214], BAD, 2, "--")
    picture.text(560, 188, "stopped", 10, BAD, bold=True)
    picture.box(440, 240, 190, 56, "checkpoint: epoch,\nweights, momentum", PALE, INK, size=10)
    picture.arrow((440, 122), (500, 236), "write temporary file, rename", shift=(-98, 12))
    picture.arrow((634, 268), (746, 212), "load", bend=0.25, shift=(36, 34))
    picture.text(225, 268, "the final weights equal those of\none uninterrupted process", 10.5)
    return picture


def ddp_by_hand() -> Picture:
    """Backward pass and network: a complete bucket is sent while the backward pass continues."""
    picture = Picture(300)
    buckets = ((8, 7, 6), (5, 4), (3, 2), (1,))
    picture.text(104, 75, "backward()", 10.5, at="right", bold=True)
    picture.text(104, 175, "network", 10.5, at="right", bold=True)
    picture.line([116, 866], [108, 108], "#d0d7de", 1)
    x, free = 120, 0
    for number, layers in enumerate(buckets):
        start = x
        for layer in layers:
            picture.box(x, 58, 72, 34, f"layer {layer}", RANKS[number], round=3, size=9.5)
            x += 74
        picture.line([start, x - 4], [99, 99], DARK[number], 2)
        leave = max(x, free)
        length = 48 + 34 * len(layers)
        picture.arrow((x - 6, 102), (leave + 20, 154), color=DARK[number])
        picture.box(leave + 4, 158, length, 34, f"bucket {number}", RANKS[number], round=3, size=9.5)
        free = leave + length + 2
    picture.text(
        450, 28, "gradients are computed from the last layer to the first; complete buckets are sent", 11, bold=True
    )
    picture.arrow((116, 222), (862, 222), color=GREY)
    picture.text(489, 240, "time", 9, GREY)
    picture.text(450, 268, "the all-reduces of all but the last bucket overlap with the rest of backward()", 10)
    return picture


def elastic() -> Picture:
    """Two workers, one of which is killed, and the generation that starts from the snapshot."""
    picture = Picture(320)
    for first, steps, left, title in ((0, 5, 110, "generation 0"), (4, 4, 560, "generation 1")):
        picture.text(left + 38 * steps, 32, title, 11.5, bold=True)
        for worker in range(2):
            y = 60 + 56 * worker
            for number in range(steps):
                again = first == 4 and number == 0
                color = RANKS[worker]
                picture.box(left + 76 * number, y, 72, 36, f"step {first + number}", color, DARK[1] if again else None)
    for worker in range(2):
        picture.text(98, 78 + 56 * worker, f"worker {worker}", 10, at="right")
    picture.text(510, 134, "x", 24, BAD, bold=True)
    picture.text(520, 78, "ended", 9.5, GREY)
    for x in (262, 414):
        picture.box(x - 36, 184, 72, 32, "snapshot", PALE, INK, size=9)
        picture.arrow((x - 2, 154), (x - 2, 181), color=GREY)
    picture.arrow((452, 200), (596, 156), "start from step 4", bend=0.25, color=DARK[0], shift=(60, 46), size=10)
    picture.text(225, 248, "a snapshot every two steps", 9.5, GREY)
    picture.text(
        450,
        286,
        "torchrun stops the remaining workers and starts a new generation; only step 4 is repeated",
        10,
    )
    return picture


def syncbn() -> Picture:
    """Three uneven batches whose sums meet, and one mean and variance that go back."""
    picture = Picture(330)
    for rank, count in enumerate((7, 3, 1)):
        y = 34 + 92 * rank
        picture.text(92, y + 34, f"process {rank}", 10.5, DARK[rank], at="right", bold=True)
        for image in range(count):
            picture.box(104 + 22 * (image % 4), y + 12 + 24 * (image // 4), 18, 20, fill=RANKS[rank], round=2)
        picture.text(204, y + 34, f"{count} image{'s' if count > 1 else ''}", 10, at="left")
        picture.box(290, y + 14, 150, 40, f"sum, squares, {count}", RANKS[rank], size=10)
        picture.arrow((444, y + 34), (536, 120 + 40 * rank), color=DARK[rank])
        picture.arrow((664, 120 + 40 * rank), (724, y + 34), color=GREY)
        picture.box(728, y + 14, 140, 40, "mean, variance", WHITE, DARK[rank], size=10)
    picture.box(540, 96, 120, 128, "all-reduce\n\n7 + 3 + 1\n= 11", "#d0d7de", size=11)
    picture.text(450, 308, "equal on every process and weighted by the counts: batch norm over all 11 images", 10)
    return picture
