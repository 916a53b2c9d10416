"""Slices of the sequence: a step that is cut into stages, written so that a stage runs one slice after another.

In: an `AssignedStep` (its loop over micro-batches, layers, stages of all operations) and the tokens of each slice. Out:
the same step, exactly, in which every operation of the loop's body belongs to a phase: forward of a slice, or backward
of one. Stages, layers and everything after them are as for whole sequences. Where a token depends on later ones, an
error that names the operation.
"""

from alpa_lite.passes.tokens.slicing import slice_sequence

__all__ = ["slice_sequence"]
