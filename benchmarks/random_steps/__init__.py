"""Random train-like steps for the differential test: programs as text, kinds of lines, and how they are fed."""
