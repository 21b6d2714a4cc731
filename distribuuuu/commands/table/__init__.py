"""Tables of finished runs."""
