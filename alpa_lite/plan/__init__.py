"""The plan of a step, and the records in it."""
