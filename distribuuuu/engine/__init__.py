"""The parts of a run around the training loop.

- run.py: `Training` and `Run`, the objects that the functions of trainer.py share.
- preflight.py: checks of paths, data and batch sizes before torch is imported.
- build.py: process group, OUT_DIR, log, model and state of a run; run_lock.py: one training at a time per OUT_DIR.
- dry_run.py: one training step and one evaluation batch before training, to fail early.
- auto_batch_size.py: TRAIN.BATCH_SIZE auto, the largest micro-batch that fits into memory.
- out_of_memory.py: out-of-memory errors that name the options to change.
- state.py: what a checkpoint stores, and how training resumes from it; resume.py: how a run goes on from one.
- evaluator.py: evaluation of every image exactly once; precise_bn.py: exact batch-norm statistics before it.
- run_description.py: log lines at the start and the end of a run; results_content.py: the content of results.json and
  test_results.json.
- graceful_stop.py: the stop on SIGTERM, SIGINT, SIGHUP, SIGUSR1 or after CHECKPOINT.MAX_HOURS, at the same step on
  every process. launch/signals.py receives the signals and defines the exit statuses; trainer.py saves the checkpoint.
"""
