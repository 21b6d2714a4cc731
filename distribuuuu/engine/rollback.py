"""Rollback of a run to its newest checkpoint after an infinite or NaN loss."""

import logging

from distribuuuu.checkpoint.io import CheckpointError, read_checkpoint
from distribuuuu.config.errors import NonFiniteError
from distribuuuu.engine.resume import restore_state, restore_task
from distribuuuu.engine.run import Run

logger = logging.getLogger(__name__)


def roll_back(run: Run, error: NonFiniteError) -> None:
    """Restore the newest checkpoint, whose values are all finite, and continue with other random numbers.

    Raises:
        NonFiniteError: TRAIN.ON_NAN or TRAIN.MAX_ROLLBACKS does not allow a rollback, or there is no checkpoint.
    """
    cfg, state = run.cfg, run.state
    try:
        run.checkpoints.finish()
    except CheckpointError as unwritten:
        logger.error("%s", unwritten)
    latest, num = run.checkpoints.find_latest(), state.num_rollbacks + 1
    position = f"in epoch {state.epoch + 1}, by step {state.step}"
    if latest is None:
        remedy = "set CHECKPOINT.EVERY_STEPS, to have checkpoints within the epoch"
        raise error.located(f"{position}; there is no checkpoint", remedy) from None
    if cfg.TRAIN.ON_NAN == "stop" or num > cfg.TRAIN.MAX_ROLLBACKS:
        remedy = "set TRAIN.ON_NAN rollback" if cfg.TRAIN.ON_NAN == "stop" else "raise TRAIN.MAX_ROLLBACKS"
        raise error.located(f"{position}; the newest checkpoint, {latest}, is finite", remedy) from None
    logger.warning("%s in epoch %d, by step %d: rollback %d of %d, to %s", error, state.epoch + 1, state.step, num,
                   cfg.TRAIN.MAX_ROLLBACKS, latest)  # fmt: skip
    content = read_checkpoint(latest, to_resume=True)
    restore_state(state, content, latest)
    restore_task(run.task, content.get("task"), latest)
    state.load_meter([])
    state.num_rollbacks = num
    run.log.rewind(state.epoch, state.step)
