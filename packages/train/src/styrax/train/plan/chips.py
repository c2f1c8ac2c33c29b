"""What accelerators can do at best, from their makers' data sheets; importing it costs no jax."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30

_CLOUD = "https://cloud.google.com/tpu/docs/"
_NVIDIA = "https://www.nvidia.com/en-us/data-center/"


@dataclass(frozen=True, kw_only=True)
class Chip:
    """Peak figures of one chip; None where its maker gives none.

    A figure of a device is that of its chip divided by `devices`: JAX sees some chips as two devices.

    Attributes:
        name: As in a topology, such as "v5p", or its usual name.
        device_kind: What ``jax.Device.device_kind`` says.
        flops: Products and sums of bfloat16 matrices a second, without sparsity.
        hbm_bytes: Memory.
        hbm_bandwidth: Bytes a second between memory and chip.
        ici_bandwidth: Bytes a second out of the chip over all links to chips of its slice or node; as many come in.
        dcn_bandwidth: Bytes a second between slices.
        devices: JAX devices a chip.
        dims: Dimensions of a slice's shape; 0 for what has no topologies.
        source: Where the figures stand.
    """

    name: str
    device_kind: str
    flops: float
    hbm_bytes: int
    hbm_bandwidth: float
    ici_bandwidth: float | None = None
    dcn_bandwidth: float | None = None
    devices: int = 1
    dims: int = 0
    source: str = ""


# Google gives links in both directions together; here they are halved. Networks of slices are given per chip or per
# pod; then divided by the pod's chips.
CHIPS: tuple[Chip, ...] = (
    Chip(
        name="v2", device_kind="TPU v2", flops=46e12, hbm_bytes=16 * GIB, hbm_bandwidth=700e9, devices=2, dims=2,
        source=_CLOUD + "v2",
    ),
    Chip(
        name="v3", device_kind="TPU v3", flops=123e12, hbm_bytes=32 * GIB, hbm_bandwidth=900e9, devices=2, dims=2,
        source=_CLOUD + "v3",
    ),
    Chip(
        name="v4", device_kind="TPU v4", flops=275e12, hbm_bytes=32 * GIB, hbm_bandwidth=1200e9, ici_bandwidth=300e9,
        devices=2, dims=3, source=_CLOUD + "v4",
    ),
    Chip(
        name="v5e", device_kind="TPU v5 lite", flops=197e12, hbm_bytes=16 * GIB, hbm_bandwidth=819e9,
        ici_bandwidth=200e9, dcn_bandwidth=3.125e9, dims=2, source=_CLOUD + "v5e",
    ),
    Chip(
        name="v5p", device_kind="TPU v5", flops=459e12, hbm_bytes=95 * GIB, hbm_bandwidth=2765e9,
        ici_bandwidth=600e9, dcn_bandwidth=6.25e9, dims=3, source=_CLOUD + "v5p",
    ),
    Chip(
        name="v6e", device_kind="TPU v6 lite", flops=918e12, hbm_bytes=32 * GIB, hbm_bandwidth=1638e9,
        ici_bandwidth=400e9, dcn_bandwidth=12.5e9, dims=2, source=_CLOUD + "v6e",
    ),
    Chip(
        name="tpu7x", device_kind="TPU7x", flops=2307e12, hbm_bytes=192 * GIB, hbm_bandwidth=7380e9,
        ici_bandwidth=600e9, devices=2, dims=3, source=_CLOUD + "tpu7x",
    ),
    Chip(
        name="A100-40GB", device_kind="NVIDIA A100-SXM4-40GB", flops=312e12, hbm_bytes=40 * 10**9,
        hbm_bandwidth=1555e9, ici_bandwidth=300e9, source=_NVIDIA + "a100",
    ),
    Chip(
        name="A100-80GB", device_kind="NVIDIA A100-SXM4-80GB", flops=312e12, hbm_bytes=80 * 10**9,
        hbm_bandwidth=2039e9, ici_bandwidth=300e9, source=_NVIDIA + "a100",
    ),
    Chip(
        name="A100-80GB-PCIe", device_kind="NVIDIA A100 80GB PCIe", flops=312e12, hbm_bytes=80 * 10**9,
        hbm_bandwidth=1935e9, source=_NVIDIA + "a100",
    ),
    # The data sheets of Hopper count sparse products; dense ones are half of them.
    Chip(
        name="H100", device_kind="NVIDIA H100 80GB HBM3", flops=989.5e12, hbm_bytes=80 * 10**9,
        hbm_bandwidth=3350e9, ici_bandwidth=450e9, source=_NVIDIA + "h100",
    ),
    Chip(
        name="H100-PCIe", device_kind="NVIDIA H100 PCIe", flops=756.5e12, hbm_bytes=80 * 10**9,
        hbm_bandwidth=2000e9, source=_NVIDIA + "h100",
    ),
    Chip(
        name="H200", device_kind="NVIDIA H200", flops=989.5e12, hbm_bytes=141 * 10**9,
        hbm_bandwidth=4800e9, ici_bandwidth=450e9, source=_NVIDIA + "h200",
    ),
)  # fmt: skip
"""All that are known."""


def chip_of(device_kind: str) -> Chip | None:
    """Find a chip by what JAX calls its devices; None for one that is not known, rather than a similar one.

    >>> chip_of("TPU v5 lite").name, chip_of("TPU v99"), chip_of("cpu")
    ('v5e', None, None)
    """
    return next((chip for chip in CHIPS if chip.device_kind == device_kind), None)


def chip_named(name: str) -> Chip | None:
    """Find a chip by its name in a topology.

    >>> chip_named("tpu7x").devices
    2
    """
    return next((chip for chip in CHIPS if chip.name == name), None)


def peak_flops(device_kind: str) -> float | None:
    """Peak bfloat16 operations a second of one JAX device, for the share that is used of it; None if not known.

    >>> peak_flops("TPU7x"), peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("some card")
    (1153500000000000.0, 989500000000000.0, None)
    """
    chip = chip_of(device_kind)
    return None if chip is None else chip.flops / chip.devices
