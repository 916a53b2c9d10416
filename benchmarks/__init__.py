"""Measurements of the library, by one tool: `python -m benchmarks run | report | compare | pictures`."""
