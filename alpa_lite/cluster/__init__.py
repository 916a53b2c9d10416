"""Clusters: their devices and links, presets, and the price of collectives on them."""

from alpa_lite.cluster.machine import CALIBRATION as CALIBRATION
from alpa_lite.cluster.machine import DEVICE_RESERVE as DEVICE_RESERVE
from alpa_lite.cluster.machine import Cluster as Cluster
from alpa_lite.cluster.presets import ALLOCATOR_RESERVE as ALLOCATOR_RESERVE
from alpa_lite.cluster.presets import HOST_RESERVE as HOST_RESERVE
from alpa_lite.cluster.rates import Curve as Curve
from alpa_lite.cluster.rates import Dispatch as Dispatch
from alpa_lite.cluster.rates import Link as Link
