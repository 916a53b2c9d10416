"""Runs of several processes: arrays of all, transfers between processes, and results that others have."""
