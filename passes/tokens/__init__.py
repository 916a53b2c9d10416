"""Slices of the sequence: where it is in a step, how each operation is done slice by slice, and the step in slices."""
