"""The search of stages: costs of ranges of layers, pipelines as paths, and the fastest of them."""
