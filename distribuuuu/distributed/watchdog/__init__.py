"""Watchdog of a run of several processes: all end within seconds after one has died, failed or stalled, which is named.

It is found by its presence: without it, a process ends when a collective fails or by its own stall timer.
"""
