"""The command track: sends what the trackers of a run have not received."""
