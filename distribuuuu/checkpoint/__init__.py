"""Checkpoints: OUT_DIR/checkpoints/ckpt_ep_NNN[_step_NNNNNN].pth.tar to resume, best.pth.tar and best_ema.pth.tar.

- manager.py: decide which weights are the best (`Best.update`), save in the background, find the newest valid
  checkpoint, remove old ones
- io.py: write a file atomically; read a file and verify it
- load.py: check that a checkpoint can be resumed; load weights and optimizer state
- locate.py: find the weights file that an option names
"""
