"""The configuration of a second place for checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from styrax.checkpoint.retention import Best
from styrax.core.config import Positive, PositiveFloat, check


@dataclass(frozen=True, kw_only=True)
class Mirror:
    """Where checkpoints are uploaded to after they were saved, which of them, and what stays there.

    Keys and endpoints are no part of it, because a configuration is written into logs and checkpoints: they come from
    the environment (`AWS_PROFILE`, `AWS_ENDPOINT_URL`, ...) or from fsspec's own configuration files.

    Attributes:
        url: Such as `s3://bucket/runs/a/checkpoints`, `gs://...`, or `file:///mnt/nas/a` for another disk.
        every: Upload only steps that this divides; all by default.
        temporary: Also upload those that were saved as temporary.
        keep_last: How many of the newest checkpoints to keep there.
        keep_every: Also keep there, for ever, those of steps that this divides; none by default.
        keep_best: Also keep there the best by a metric.
        verify: After an upload compare the sizes of all objects, or read all of them back.
        on_error: An upload that fails is an error of the next call, or is logged; `close` raises it in both cases.
        workers: Requests at a time.
        attempts: How often a request is made at most while the server is busy or does not answer.
        close_timeout: Seconds that `close` waits for uploads; without limit by default.
    """

    url: str
    every: Positive | None = None
    temporary: bool = False
    keep_last: Positive = 3
    keep_every: Positive | None = None
    keep_best: Best | None = None
    verify: Literal["size", "readback"] = "size"
    on_error: Literal["raise", "log"] = "raise"
    workers: Positive = 8
    attempts: Positive = 5
    close_timeout: PositiveFloat | None = None

    def __post_init__(self) -> None:
        check(self)
        if "://" not in self.url:
            raise ValueError(f"url: {self.url!r} is no URL; expected one such as s3://bucket/folder or file:///folder")
