"""Text that is needed only when something is wrong: imported inside the branch that raises the error, without torch."""
