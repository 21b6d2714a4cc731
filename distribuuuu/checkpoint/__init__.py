"""What a run stores to resume and to use: checkpoints and best weights, their files, background saving, loading."""
