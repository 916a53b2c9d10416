"""The verbs: a value in, a new frozen value out. No devices, no globals, no input or output."""
