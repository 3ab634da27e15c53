"""Measurements: run time, memory, distance from the machine's limit, and the table of mechanisms."""
