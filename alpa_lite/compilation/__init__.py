"""Drivers of `alpa_lite.compiler`: requests, plans kept, replayed and cached, and the runner of passes."""
