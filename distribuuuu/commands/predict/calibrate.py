"""The command calibrate: fit the confidence of a trained model to validation images."""

import os
from dataclasses import replace

from distribuuuu.commands.flag_hints import CommandParser, at_least
from distribuuuu.commands.output import print_report
from distribuuuu.config import ConfigError
from distribuuuu.config.errors import counted
from distribuuuu.inference.locate_run import locate_run
from distribuuuu.launch.host import count_cores, tune_malloc

_DESCRIPTION = """Fit the confidence of a trained model to validation images, and store it
beside the weights as calibration.json: a temperature, and thresholds for
--precision. predict, report and export apply it. RUN is an OUT_DIR or an
exported folder; its evaluation images are used. A run of finetune has it.

  %(prog)s exp/r50
  %(prog)s exp/r50 TEST.DATASET photos TEST.SPLIT val DATA.NAME imagefolder
"""
_TEST_SPLITS = ("test", "testing")


def calibrate(prog: str, args: list[str]) -> int:
    """Classify the validation images, fit the calibration and write it; return the exit status."""
    flags = build_parser(prog).parse_args(args)
    locate_run(flags.run)
    tune_malloc()
    import torch

    from distribuuuu.commands.scan.data_config import open_images
    from distribuuuu.inference.calibration import calibration_error, fit_calibration, write_calibration
    from distribuuuu.inference.forward_chunks import LOADED, ChunkLoader, list_spans
    from distribuuuu.inference.load_run import find_run
    from distribuuuu.records.run_log import progress

    run = replace(find_run(flags.run, None, flags.overrides), calibration=None)
    run.check_classifier()
    if run.folder is None or run.state_dict is None or not os.access(run.folder, os.W_OK):
        raise ConfigError(f"RUN: got {flags.run}; expected the OUT_DIR of a run or an exported folder, to write to")
    if run.cfg.TEST.SPLIT.lower() in _TEST_SPLITS:
        reason = "a model that was calibrated by its test images is not tested by them"
        raise ConfigError(f"TEST.SPLIT: got {run.cfg.TEST.SPLIT}: {reason}; fix: TEST.SPLIT val")
    images = open_images(run.cfg, train=False)
    if images.targets != "label" or run.task.multilabel or tuple(images.classes) != run.classes:
        expected = f"images with one label of the classes of {flags.run}"
        raise ConfigError(f"DATA.NAME: got {run.cfg.DATA.NAME}; expected {expected}")
    spans = list_spans(len(images), run.cfg.TEST.BATCH_SIZE)
    loader = ChunkLoader(images, run.transform, spans, run.device, LOADED, flags.workers, "process")
    run.build()
    kept, parts = list[int](), list[torch.Tensor]()
    for span, pixels, causes in progress(loader.chunks(), label="calibrate", total=len(spans)):
        if intact := [fault for fault in causes.values() if not fault.is_damaged]:
            raise intact[0].error()
        own = [index for index in span if index not in causes]
        parts.append(run.compute_scores(pixels).float().cpu()[[index - span.start for index in own]])
        kept += own
    logits, labels = torch.cat(parts), torch.tensor([int(images.label(index)) for index in kept])
    if not kept:
        raise ConfigError(f"TEST.DATASET: none of {counted(len(images), 'image')} can be read; fix: distribuuuu doctor")
    if not logits.isfinite().all():
        raise ConfigError(f"RUN: {run.source} has scores that are not finite; fix: name another checkpoint")
    found = fit_calibration(logits, labels, images.digest)
    write_calibration(run.folder, found, run.state_dict)
    errors = [calibration_error(logits / temperature, labels) for temperature in (1.0, found.temperature)]
    by = f"temperature {found.temperature:.3f} by {counted(len(kept), 'validation image')}"
    by += f" ({len(images) - len(kept):,} broken ones left out)" if len(kept) < len(images) else ""
    changed = f"calibration error {100 * errors[0]:.2f} % before, {100 * errors[1]:.2f} % after"
    print_report(f"{run.folder / 'calibration.json'}: {by}; {changed}")
    return 0


def build_parser(prog: str | None = None) -> CommandParser:
    """Return the parser of the arguments."""
    parser = CommandParser(prog, description=_DESCRIPTION, usage="%(prog)s RUN [flags] [KEY VALUE ...]")
    parser.add_argument("run", metavar="RUN", help="the OUT_DIR of a run, or an exported folder")
    workers = "loader workers (one per core)"
    parser.add_argument("--workers", metavar="N", type=at_least(0), default=count_cores(), help=workers)
    return parser
