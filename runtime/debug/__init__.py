"""Faults of planned steps: errors of callbacks, invalid values, differences, jobs that stand still; and profiles."""
