"""The epochs after which a model is evaluated, and the one after which a run ends.

All are functions of the config and the state, so a resumed run decides as the run that it continues.
"""

from distribuuuu.config import Config
from distribuuuu.engine.train_state import TrainState


def is_evaluated(cfg: Config, epoch: int) -> bool:
    """Tell whether the model is evaluated after an epoch, from 0."""
    return (epoch + 1) % cfg.TRAIN.EVAL_PERIOD == 0 or epoch + 1 == cfg.OPTIM.MAX_EPOCH


def is_out_of_patience(cfg: Config, state: TrainState, epoch: int) -> bool:
    """Tell whether an epoch, from 0, is evaluated, and TRAIN.PATIENCE epochs or more after the best one."""
    if not cfg.TRAIN.PATIENCE or not is_evaluated(cfg, epoch):
        return False
    best = max(state.bests[kind].epoch for kind in state.models)
    return best >= 0 and epoch - best >= cfg.TRAIN.PATIENCE


def is_finished(cfg: Config, state: TrainState) -> bool:
    """Tell whether no epoch is left to train."""
    return state.epoch >= cfg.OPTIM.MAX_EPOCH or (state.step == 0 and is_out_of_patience(cfg, state, state.epoch - 1))


def may_be_last(cfg: Config, state: TrainState, kind: str) -> bool:
    """Tell whether the evaluation of a kind of weights after this epoch may be the last one of the run."""
    is_last_epoch = state.epoch + 1 == cfg.OPTIM.MAX_EPOCH or is_out_of_patience(cfg, state, state.epoch)
    return is_last_epoch and kind == list(state.models)[-1]
