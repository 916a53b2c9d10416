"""Measures the addressable devices, and fits the cost model's parameters of a cluster to them.

    samples     the measurements to make
    measuring   seconds of products, elementwise operations, collectives and the start of tasks, on all devices at once
    fitting     the parameters of `alpa_lite.cluster.Cluster` that explain them best, with the error of each fit
    storing     the results, and the file that `alpa-lite calibrate` writes and `Cluster.load` reads

Measurements mimic plans: every device has the same work at the same time, so that devices that share cores, memory or
links are measured while they share them. `docs/calibration.md` describes it in full.
"""
