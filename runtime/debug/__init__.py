"""Compares a planned step with the step as written, operation by operation."""
