"""Pipelines over several processes compute what one device computes."""

from __future__ import annotations

import json

from tests.processes import driver


def test_a_pipeline_over_two_processes_trains_as_one_device_does():
    """Stages of two devices, each in a process of its own: losses, parameters and every block of them."""
    options = {"num_stages": 2, "submesh_shapes": [2, 2]}
    texts = driver.agreed("mlp.py", 2, 2, json.dumps(options))
    for text in texts:
        assert "stages 2 meshes [(2,), (2,)]" in text
        assert "blocks 15 " in text  # 3 steps: 2 parameters on 2 devices, and the loss, which both are told
