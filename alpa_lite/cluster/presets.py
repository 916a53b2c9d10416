"""Numbers of known machines: plain data, each with its source.

Units: bytes, bytes/s, FLOP/s, seconds. Links count one direction: NVLink figures of data sheets are totals of both and
are halved here. A memory of "80 GB" is 80 GiB, as such stacks are. The peak named f32 is that of matrix products at
JAX's default precision: TF32 on A100 and later, bfloat16 passes on TPUs. `matmul_efficiency` is the largest measured
fraction of the bf16 peak where the source has one, else 0.8. The rates of whole steps are `STEP_RATES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GIB = 2**30

#: Seconds that a process takes to start a task of a pipeline (a run or a transfer), where nothing else is known:
#: measured on two CPU cores, 67 and 110 microseconds on submeshes of two virtual devices (two versions of JAX: 112 and
#: 183 a run with the two transfers that follow three runs, benchmarks/results/pipeline_overhead.json, packed values).
#: The hosts of GPUs and TPUs are taken to be as fast, and to start a task on all their devices at once: not measured.
TASK_SECONDS = 1e-4

#: The kinds of collectives that compilers run while a device computes, by platform: as the scheduled HLO of a
#: data-parallel and a ZeRO-3 step has them, compiled for 8 H100 by XLA of JAX 0.10.2 and 0.12, and for a v5e 2x4 slice
#: by libtpu 0.0.50, which starts and awaits sums in one instruction, with and without its options for asynchronous
#: ones. ROCm is taken to do as CUDA does. On CPUs every collective runs to its end.
HIDES: Mapping[str, frozenset[str]] = {
    "cuda": frozenset({"all_gather", "all_reduce", "reduce_scatter"}),
    "rocm": frozenset({"all_gather", "all_reduce", "reduce_scatter"}),
    "tpu": frozenset({"all_gather"}),
}

#: Compiler options that make XLA do so. (docs.jax.dev, "GPU performance tips", has it as off by default; the two
#: versions above schedule those steps in the same way without it.)
OVERLAPPING: Mapping[str, Mapping[str, Any]] = {
    platform: {"xla_gpu_enable_latency_hiding_scheduler": True} for platform in ("cuda", "rocm")
}

#: By platform, kernel of fused attention -> the fractions of the bf16 peak that its forward and its backward pass
#: reach, with FLOPs as `passes.ir.attention` counts them. Presets may state their own.
#:
#: cudnn on H100: Shah et al., "FlashAttention-3" (arXiv 2407.08608), figures 5 and 6: causal, heads of 128, sequences
#: of 2,000 to 16,000 tokens: 480 to 610 TFLOP/s forward, 400 to 530 backward (recalled, not read again).
#: TPU kernels: no source with both passes is known; assumed to reach as much as cuDNN does on H100.
#: ROCm: JAX has no kernel of its own there.
ATTENTION_EFFICIENCY: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "cuda": {"cudnn": (0.55, 0.47)},
    "tpu": {"flash_attention": (0.55, 0.47), "splash_attention": (0.55, 0.47)},
}

#: The same of cuDNN on A100, which like FlashAttention-2 uses tensor cores of its generation: Dao, "FlashAttention-2"
#: (arXiv 2307.08691), figures 4 to 6: causal, heads of 128: 155 to 190 of 312 TFLOP/s both passes together, up to 73 %
#: forward and 63 % backward (recalled, not read again).
_A100_ATTENTION = {"cudnn": (0.6, 0.52)}

#: Seconds that a kernel takes to start on NVIDIA GPUs, by itself and within a compiled step. By itself: with it,
#: MeshCost.matmul is within 30 % of 93 % of the bf16 products of H100 and 98 % of those of B200 in the tables that XLA
#: carries (jax-cuda12-pjrt 0.10.2), without it of 49 % and 9 %. Within a step: no source is known, 2 to 3 microseconds
#: are assumed; the published steps of `STEP_RATES` do not decide between 0 and 5. ROCm is taken to do as CUDA does.
KERNEL_START_ALONE, KERNEL_START = 4.5e-6, 2.5e-6

#: By preset, rates within whole steps: products over the rate that they reach by themselves, and memory operations over
#: the bandwidth of the data sheet.
#:
#: h100, a100: fitted to the published steps of llm-foundry (mosaicml/llm-foundry, scripts/train/benchmarking; the rows
#: that benchmarks/published_rows.json marks as fitted; benchmarks/results/published.md scores them with one model size
#: left out): products reach 0.64 and 0.82 of the data sheet in all, memory operations about 0.67 and 0.5 of the
#: bandwidth. Copies for layouts, which are not counted, are within these. The rows decide little between these and
#: lower rates of memory (a free fit takes 0.49 and 0.36): they ran eager PyTorch, whose operations move more bytes than
#: the kernels of XLA that are counted here.
#: a100-40gb: as a100. h200, b200, gb200: as h100, assumed.
#: p3.16xlarge, p3dn: 0.66 of the data sheet for products in steps (Alpa's GPT of 350M on one V100, artifact of OSDI
#: 2022); memory assumed, no published step decides it.
#: mi300x, mi250x: no published step was read; memory as h100, assumed.
#: TPUs: products in steps as `TPU_MATMUL_EFFICIENCY`; memory assumed.
STEP_RATES: Mapping[str, tuple[float, float]] = {
    "h100": (0.8, 0.67),
    "h200": (0.8, 0.67),
    "b200": (0.8, 0.67),
    "gb200": (0.8, 0.67),
    "a100": (0.945, 0.5),
    "a100-40gb": (0.945, 0.5),
    "p3.16xlarge": (0.825, 0.75),
    "p3dn": (0.825, 0.75),
    "mi300x": (1.0, 0.67),
    "mi250x": (1.0, 0.67),
    "v4": (1.0, 0.85),
    "v5e": (1.0, 0.85),
    "v5p": (1.0, 0.85),
    "v6e": (1.0, 0.85),
    "v7": (1.0, 0.85),
}

#: `matmul_efficiency` of TPU slices: v5e is fitted to MaxText's published steps of one slice (published_rows.json); the
#: others are taken to reach as much.
TPU_MATMUL_EFFICIENCY = 0.93

_ML = "stas00/ml-engineering compute/accelerator/README.md"
_BOOK = "jax-ml/scaling-book tpus.md"
_RECALLED = "f32 and f64 peaks from the vendor's data sheet, recalled; latencies are assumptions of the usual order"

_CUDA: dict[str, Any] = {"platform": "cuda", "nodes": 1, "devices_per_node": 8}
_ROCM = {**_CUDA, "platform": "rocm"}

#: Keyword arguments of `Cluster` for machines with nodes; `nodes` is the default number of nodes.
NODES: Mapping[str, Mapping[str, Any]] = {
    "p3.16xlarge": _CUDA
    | {
        "device": "V100-SXM2-16GB",
        "nodes": 8,
        "memory": 16 * GIB,
        "peak_flops": {"bf16": 15.7e12, "f16": 125e12, "f32": 15.7e12, "f64": 7.8e12},
        "memory_bandwidth": 900e9,
        "node_link": (150e9, 3e-6),
        "network_link": (3.125e9, 30e-6),
        "parallel_units": 80,
        "source": "900 GB/s: Cornell CVW; NVLink2 6 x 25 GB/s a direction, 25 Gb/s per node of 8: recalled, confidence "
        f"high. bf16 has no tensor cores here. {_RECALLED}",
    },
    "p3dn": _CUDA
    | {
        "device": "V100-SXM2-32GB",
        "memory": 32 * GIB,
        "peak_flops": {"bf16": 15.7e12, "f16": 125e12, "f32": 15.7e12, "f64": 7.8e12},
        "memory_bandwidth": 900e9,
        "node_link": (150e9, 3e-6),
        "network_link": (12.5e9, 20e-6),
        "parallel_units": 80,
        "source": "900 GB/s: Cornell CVW; NVLink2 6 x 25 GB/s a direction, 100 Gb/s per node: recalled, "
        f"confidence high. bf16 has no tensor cores here. {_RECALLED}",
    },
    "a100-40gb": _CUDA
    | {
        "device": "A100-SXM-40GB",
        "memory": 40 * GIB,
        "peak_flops": {"bf16": 312e12, "f16": 312e12, "f32": 156e12, "f64": 19.5e12},
        "memory_bandwidth": 1555e9,
        "node_link": (300e9, 3e-6),
        "network_link": (50e9, 10e-6),
        "matmul_efficiency": 0.869,
        "attention_efficiency": _A100_ATTENTION,
        "parallel_units": 108,
        "source": f"312 TFLOP/s, 271.2 measured (80 GB card): {_ML}; 1555 GB/s, NVLink3 600 GB/s both ways, p4d "
        f"400 Gb/s: recalled, confidence high. {_RECALLED}",
    },
    "a100": _CUDA
    | {
        "device": "A100-SXM-80GB",
        "memory": 80 * GIB,
        "peak_flops": {"bf16": 312e12, "f16": 312e12, "f32": 156e12, "f64": 19.5e12},
        "memory_bandwidth": 2000e9,
        "node_link": (300e9, 3e-6),
        "network_link": (200e9, 10e-6),
        "matmul_efficiency": 0.869,
        "attention_efficiency": _A100_ATTENTION,
        "parallel_units": 108,
        "source": f"312 TFLOP/s, 271.2 measured, 2000 GB/s: {_ML}; NVLink3 600 GB/s both ways, 8 x 200 Gb/s "
        f"HDR: recalled, confidence high. {_RECALLED}",
    },
    "h100": _CUDA
    | {
        "device": "H100-SXM",
        "memory": 80 * GIB,
        "peak_flops": {"bf16": 989e12, "f16": 989e12, "f32": 494e12, "f64": 67e12},
        "memory_bandwidth": 3350e9,
        "node_link": (450e9, 3e-6),
        "network_link": (400e9, 10e-6),
        "matmul_efficiency": 0.803,
        "parallel_units": 132,
        "source": f"989 TFLOP/s, 794.5 measured, 3350 GB/s: {_ML}; NVLink4 900 GB/s both ways: MLPerf system "
        f"description; 8 x 400 Gb/s NDR: recalled, confidence high. {_RECALLED}",
    },
    "h200": _CUDA
    | {
        "device": "H200-SXM",
        "memory": 140 * GIB,
        "peak_flops": {"bf16": 989e12, "f16": 989e12, "f32": 494e12, "f64": 67e12},
        "memory_bandwidth": 4800e9,
        "node_link": (450e9, 3e-6),
        "network_link": (400e9, 10e-6),
        "matmul_efficiency": 0.803,
        "parallel_units": 132,
        "source": f"989 TFLOP/s, 141 GB (rounded down to 140 GiB), 4800 GB/s: {_ML}; NVLink4 900 GB/s both "
        f"ways, 8 x 400 Gb/s: MLPerf system description; efficiency as measured on H100. {_RECALLED}",
    },
    "b200": _CUDA
    | {
        "device": "B200-SXM",
        "memory": 178 * GIB,
        "peak_flops": {"bf16": 2250e12, "f16": 2250e12, "f32": 1125e12, "f64": 37e12},
        "memory_bandwidth": 8000e9,
        "node_link": (900e9, 3e-6),
        "network_link": (400e9, 10e-6),
        "parallel_units": 148,
        "source": f"2250 TFLOP/s (dense), 8000 GB/s: {_ML}; 191,514,411,008 bytes, 148 multiprocessors: XLA's target "
        "configuration; NVLink5 1800 GB/s both ways, 8 x 400 Gb/s, 1125 TFLOP/s of TF32 and 37 of f64: HGX B200, "
        "recalled, confidence high; latencies as of H100",
    },
    "gb200": _CUDA
    | {
        "device": "GB200-NVL72",
        "devices_per_node": 72,
        "memory": 184 * GIB,
        "peak_flops": {"bf16": 2500e12, "f16": 2500e12, "f32": 1250e12, "f64": 40e12},
        "memory_bandwidth": 8000e9,
        "node_link": (900e9, 3e-6),
        "network_link": (3600e9, 10e-6),
        "parallel_units": 148,
        "source": "NVIDIA's data sheet of GB200 NVL72, divided by its 72 GPUs, which one NVLink switch joins: 360 "
        "PFLOP/s of bf16 with sparsity, 576 TB/s, 13.4 TB, 130 TB/s of NVLink both ways: recalled, confidence high; a "
        "400 Gb/s adapter for each GPU and the latencies of H100 are assumed",
    },
    "mi300x": _ROCM
    | {
        "device": "MI300X",
        "memory": 191 * GIB,
        "peak_flops": {"bf16": 1307.4e12, "f16": 1307.4e12, "f32": 163.4e12, "f64": 163.4e12},
        "memory_bandwidth": 5300e9,
        "node_link": (448e9, 3e-6),
        "network_link": (400e9, 10e-6),
        "matmul_efficiency": 0.511,
        "parallel_units": 304,
        "source": f"1307.4 TFLOP/s, 668.4 measured, 5300 GB/s, 192 GB: {_ML}; 7 links of 64 GB/s a direction, 8 x 400 "
        "Gb/s, 163.4 TFLOP/s of f32 and f64 matrix products: AMD's data sheet, recalled, confidence high; 304 compute "
        "units: XLA's target configuration; latencies as of H100",
    },
    "mi250x": _ROCM
    | {
        "device": "MI250X-GCD",
        "devices_per_card": 2,
        "memory": 64 * GIB,
        "peak_flops": {"bf16": 191.5e12, "f16": 191.5e12, "f32": 47.9e12, "f64": 47.9e12},
        "memory_bandwidth": 1640e9,
        "card_link": (200e9, 3e-6),
        "node_link": (50e9, 3e-6),
        "network_link": (100e9, 10e-6),
        "matmul_efficiency": 0.768,
        "parallel_units": 110,
        "source": f"one of the two dies of a card (383 TFLOP/s is both): 191.5 TFLOP/s, 147 measured, 1640 "
        f"GB/s: {_ML}; 200 GB/s within a card, 50 to 100 GB/s between cards (the lower is used): OLCF guide; 4 x 25 "
        f"GB/s Slingshot-11 per node of 8 dies: recalled, confidence high. {_RECALLED}",
    },
    "cpu": {
        "device": "cpu",
        "platform": "cpu",
        "nodes": 1,
        "devices_per_node": 8,
        "memory": 4 * GIB,
        "peak_flops": {"bf16": 25e9, "f16": 25e9, "f32": 25e9, "f64": 12.5e9},
        "memory_bandwidth": 3.2e9,
        "node_link": (3.2e9, 16e-6),
        "network_link": (1.25e9, 50e-6),
        "tile": 16,
        "dispatch": (0.0, 45e-6),
        "source": "eight virtual devices on a machine of two cores with 32 GiB, see CPU_CORE_FLOPS in presets.py; "
        "10 Gb/s Ethernet assumed",
    },
}

#: TPU slices: `axes` of the torus, `default` topology, the largest size of a dim, and `wrap`: a dim whose size is a
#: multiple of it is a ring. The network is that of one host. With `cores` above 1 a chip is so many devices, which are
#: joined by `card_link`; topologies count chips all the same.
SLICES: Mapping[str, Mapping[str, Any]] = {
    "v4": {
        "device": "TPU v4",
        "default": (2, 2, 2),
        "largest": 16,
        "wrap": 4,
        "memory": 32 * GIB,
        "peak_flops": {"bf16": 275e12, "f32": 275e12},
        "memory_bandwidth": 1200e9,
        "node_link": (4.5e10, 1e-6),
        "host_network": (2.5e10, 20e-6),
        "source": f"{_BOOK}; latencies are assumptions of the usual order",
    },
    "v5e": {
        "device": "TPU v5e",
        "default": (2, 4),
        "largest": 16,
        "wrap": 16,
        "memory": 16 * GIB,
        "peak_flops": {"bf16": 197e12, "f32": 197e12},
        "memory_bandwidth": 819e9,
        "node_link": (5e10, 1e-6),
        "host_network": (2.5e10, 20e-6),
        "source": f"{_BOOK}; Cloud TPU documentation; latencies are assumptions of the usual order",
    },
    "v5p": {
        "device": "TPU v5p",
        "default": (2, 2, 2),
        "largest": 32,
        "wrap": 4,
        "memory": 95 * GIB,
        "peak_flops": {"bf16": 459e12, "f32": 459e12},
        "memory_bandwidth": 2765e9,
        "node_link": (1e11, 1e-6),
        "host_network": (2.5e10, 20e-6),
        "source": f"{_BOOK}; Cloud TPU documentation; latencies are assumptions of the usual order",
    },
    "v6e": {
        "device": "TPU v6e",
        "default": (2, 4),
        "largest": 16,
        "wrap": 16,
        "memory": 32 * GIB,
        "peak_flops": {"bf16": 918e12, "f32": 918e12},
        "memory_bandwidth": 1640e9,
        "node_link": (1e11, 1e-6),
        "host_network": (2.5e10, 20e-6),
        "tile": 256,
        "source": f"link: {_BOOK}; 918 TFLOP/s, 1640 GB/s: recalled, confidence high; latencies are assumptions of the "
        "usual order",
    },
    "v7": {
        "device": "TPU7x",
        "default": (2, 2, 1),
        "largest": 32,
        "wrap": 4,
        "cores": 2,
        "memory": 96 * GIB,
        "peak_flops": {"bf16": 1153.5e12, "f32": 1153.5e12, "f8": 2307e12},
        "memory_bandwidth": 3690e9,
        "node_link": (5e10, 1e-6),
        "card_link": (6e11, 1e-6),
        "host_network": (5e10, 20e-6),
        "tile": 256,
        "source": "Ironwood, one of the two cores of a chip, which JAX shows as a device each: 2307 TFLOP/s (4614 of "
        "fp8), 192 GiB, 7380 GB/s and 1200 GB/s of links both ways a chip, 3-D torus: Cloud TPU documentation of "
        "TPU7x; a core's share of a link is half of it; between the cores six times a link: the same, recalled; "
        "network and latencies are assumptions of the usual order",
    },
}

ALIASES: Mapping[str, str] = {
    "v100": "p3.16xlarge",
    "frontier": "mi250x",
    "gb200-nvl72": "gb200",
    "ironwood": "v7",
    "tpu7x": "v7",
}

#: Parts of `jax.Device.device_kind` in lower case, first match wins, and the preset that describes the device.
DEVICE_KINDS: tuple[tuple[str, str], ...] = (
    ("v100-sxm2-32gb", "p3dn"),
    ("v100-sxm3-32gb", "p3dn"),
    ("v100", "p3.16xlarge"),
    ("a100-sxm4-40gb", "a100-40gb"),
    ("a100-sxm-40gb", "a100-40gb"),
    ("a100", "a100"),
    ("h100", "h100"),
    ("h200", "h200"),
    ("gb200", "gb200"),
    ("b200", "b200"),
    ("mi300x", "mi300x"),
    ("mi250x", "mi250x"),
    ("tpu v4", "v4"),
    ("tpu v5 lite", "v5e"),
    ("tpu v5e", "v5e"),
    ("tpu v5p", "v5p"),
    ("tpu v5", "v5p"),
    ("tpu v6 lite", "v6e"),
    ("tpu v6e", "v6e"),
    ("tpu7x", "v7"),
    ("tpu v7", "v7"),
)

#: Virtual CPU devices share one machine, so its cores and its memory bandwidth are divided among them. Measured once:
#: eight devices on two cores ran float32 products of 1024 x 1024 at 4.2e11 FLOP/s in all, streamed 26 GB/s in all,
#: all-reduced 1 MiB each in 0.6 ms, and took 0.1 ms more for a small collective than for an empty call (six steps of 16
#: microseconds). Half of that rate of products a core is assumed, since many cores have narrower vectors.
CPU_CORE_FLOPS = 1e11
CPU_MEMORY_BANDWIDTH = 25.6e9
CPU_STEP_LATENCY = 16e-6

#: The same file: 42 and 84 microseconds a run on one device (two versions of JAX), 112 and 183 on two, 191 and 202 on
#: 2.7 in the mean, with the transfers that follow it, two for three runs: between 25 and 55 a task and device, and
#: nothing that does not grow with the devices.
CPU_DISPATCH = (0.0, 45e-6)
