"""Records that every run writes.

- run_log.py: train.log, test.log and the terminal; log_table.py: one row per epoch; step_timing.py: time per step.
- metric_writers.py: metrics.jsonl and TensorBoard; results.py: results.json and test_results.json.
- predictions.py: predictions.npz of the last evaluation; stored_predictions.py: its reader.
- run_groups.py: the seeds of a config as one row of a result table.
- trackers/: experiment trackers other than TensorBoard; it is deleted with the command track.
- environment.py: versions, hardware and memory limits; significance.py: intervals and tests of differences.
"""
