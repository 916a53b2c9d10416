"""Execution of planned steps on devices. Nothing here plans. docs/runtime.md follows one call."""
