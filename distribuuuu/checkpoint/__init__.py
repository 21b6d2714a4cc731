"""Checkpoints: OUT_DIR/checkpoints/ckpt_ep_NNN[_step_NNNNNN].pth.tar to resume, best.pth.tar and best_ema.pth.tar.

- weights_files.py: the kinds of weights in order of precedence, the best ones, the file that an option names
- manager.py: save in the background, find the newest valid checkpoint, remove old ones
- background_writer.py, snapshot.py: the thread that writes, with retries; the copy of a state that it writes
- io.py: write a file atomically; read a file and verify it
- load.py: the entries of a checkpoint and their valid values; load weights and optimizer state
"""
