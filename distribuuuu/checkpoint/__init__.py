"""Checkpoints and best weights of a run: their files, saving in the background, loading."""
