"""A plan as one HTML file that loads nothing: pictures of mesh, tiles, memory, time and schedule, and tables."""

from alpa_lite.report.html.page import document, fragment

__all__ = ["document", "fragment"]
