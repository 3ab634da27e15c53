"""Loaders for the tasks, from the sets' own public layouts."""
