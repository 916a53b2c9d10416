"""Measures the devices at hand, and fits to that what the cost model assumes of a cluster.

    samples     what is measured
    measuring   seconds of products, elementwise operations, collectives and the start of tasks, on all devices at once
    fitting     the parameters of `alpa_lite.cluster.Cluster` that explain them best, with the error of each fit
    storing     what was found, and the file that `alpa-lite calibrate` writes and `Cluster.calibrated` reads

What is measured is what plans do: every device has the same work at the same time, so that devices that share cores,
memory or links are measured while they share them. `docs/calibration.md` has the whole of it.
"""
