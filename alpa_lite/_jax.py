"""Every private JAX import, and every place where JAX versions differ, each with its reason.

Supported: JAX 0.10.2 (Python 3.11) to 0.12 (Python 3.12+). Nothing else in the project imports from `jax._src`.
"""

from __future__ import annotations
