"""Measured steps, calls, tasks and processes of the runtime."""
