"""Launcher detection, local processes, ports, signals and host facts. Imports no torch."""
