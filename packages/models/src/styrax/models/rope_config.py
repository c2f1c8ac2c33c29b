"""How positions turn into angles; importing it costs no jax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from styrax.core.config import Positive, PositiveFloat, check

Stretch = Annotated[float, msgspec.Meta(ge=1.0)]
"""A number, 1 or above."""

_LENGTHS = ("dynamic", "yarn", "longrope", "llama3")
_USES: dict[str, tuple[str, ...]] = {
    "factor": ("linear", "dynamic", "yarn", "longrope", "llama3", "proportional"),
    "original_max_len": _LENGTHS,
    "attention_factor": ("yarn", "longrope"),
    "yarn": ("yarn",),
    "llama3": ("llama3",),
    "longrope": ("longrope",),
}
_NEEDS: dict[str, tuple[str, ...]] = {
    "factor": ("linear", "dynamic", "yarn", "longrope", "llama3"),
    "original_max_len": _LENGTHS,
    "longrope": ("longrope",),
}
_FULL_WIDTH = ("proportional", "none")


@dataclass(frozen=True, kw_only=True)
class Yarn:
    r"""Which frequencies YaRN stretches, and its factors of the attention.

    Source: Peng et al., "YaRN" (2023), section 3.2.

    Attributes:
        beta_fast: A frequency that turns at least so often within the original length is kept.
        beta_slow: One that turns at most so often is divided by `factor`; between the two there is a ramp.
        truncate: Move the ends of the ramp outwards to whole indices of frequencies.
        mscale: With `mscale_all_dim`, cosine and sine are multiplied by
            $m(\mathrm{mscale}) / m(\mathrm{mscale\_all\_dim})$ in place of $m(1)$, where
            $m(c) = 1 + 0.1\, c \ln(\mathrm{factor})$; `Rope.attention_factor` goes before both.
        mscale_all_dim: And the scores by $m(\mathrm{mscale\_all\_dim})^2$, which is not for `rotation` to do: see
            `styrax.models.layers.rope.rope_scale`.

    Raises:
        ValueError: Values do not fit together; all problems are listed.
    """

    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    truncate: bool = True
    mscale: PositiveFloat | None = None
    mscale_all_dim: PositiveFloat | None = None

    def __post_init__(self) -> None:
        check(self)
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast: expected more than beta_slow = {self.beta_slow}, got {self.beta_fast}")


@dataclass(frozen=True, kw_only=True)
class Llama3:
    """Which frequencies of the kind "llama3" are stretched.

    Attributes:
        low_freq_factor: A frequency that turns less often than this within the original length is divided by `factor`.
        high_freq_factor: One that turns more often than this is kept; between the two there is a ramp.

    Raises:
        ValueError: Values do not fit together; all problems are listed.
    """

    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0

    def __post_init__(self) -> None:
        check(self)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor: expected more than low_freq_factor = {self.low_freq_factor}, "
                f"got {self.high_freq_factor}"
            )


@dataclass(frozen=True, kw_only=True)
class LongRope:
    """A divisor for every frequency; one for each pair of rotated channels.

    Source: Ding et al., "LongRoPE" (2024), section 3.

    Attributes:
        short_factor: Used up to the original length.
        long_factor: Used beyond it.

    Raises:
        ValueError: Values do not fit together; all problems are listed.
    """

    short_factor: tuple[PositiveFloat, ...]
    long_factor: tuple[PositiveFloat, ...]

    def __post_init__(self) -> None:
        check(self)
        short, long = len(self.short_factor), len(self.long_factor)
        if short != long:
            raise ValueError(f"long_factor: expected as many as in short_factor, {short}, got {long}")


@dataclass(frozen=True, kw_only=True)
class Rope:
    r"""Rotary positions: pair $i$ of the $d$ rotated channels turns by $f_i$ per position.

    All kinds start from $f_i = \theta^{-2i/d}$. With $s$ for `factor` and $M$ for `original_max_len`:

    * "default": $f_i$ as they are.
    * "linear": $f_i / s$.
    * "dynamic": the base becomes $\theta (sT/M - s + 1)^{d/(d-2)}$, with $T = \max(\mathrm{length}, M)$.
    * "yarn": slow frequencies are divided by $s$, fast ones kept, see `Yarn`.
    * "longrope": each is divided by its own number, see `LongRope`.
    * "llama3": slow frequencies are divided by $s$, fast ones kept, see `Llama3`; at every length.
    * "proportional": $f_i / s$ with the whole head's width for $d$, and 0 from `fraction` of the pairs on.
    * "none": nothing turns.

    Attributes:
        kind: One of the above.
        theta: $\theta$, the base.
        fraction: Part of a head's channels that is rotated, the first ones; above 0, up to 1.
        factor: $s$, 1 or more; how many times longer the context became.
        original_max_len: $M$, the length in tokens before it did.
        attention_factor: Factor of cosine and sine; none means YaRN's $1 + 0.1 \ln s$ (or what `yarn` says) and
            LongRoPE's $\sqrt{1 + \ln s / \ln M}$.
        yarn: Details of the kind "yarn"; none means its defaults.
        llama3: Details of the kind "llama3"; none means its defaults.
        longrope: Details of the kind "longrope".

    Raises:
        ValueError: A value that the kind needs is missing, one has no meaning for it, or one is out of its limits;
            all are listed.

    Example:
        >>> Rope(theta=1e6).kind
        'default'
        >>> Rope(kind="linear", original_max_len=512)
        Traceback (most recent call last):
        ValueError: factor: missing, kind "linear" needs it
        original_max_len: kind "linear" has no use for it; leave it out
    """

    kind: Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "none"] = "default"
    theta: PositiveFloat = 10_000.0
    fraction: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    factor: Stretch | None = None
    original_max_len: Positive | None = None
    attention_factor: PositiveFloat | None = None
    yarn: Yarn | None = None
    llama3: Llama3 | None = None
    longrope: LongRope | None = None

    def __post_init__(self) -> None:
        check(self)
        problems = [
            f'{name}: missing, kind "{self.kind}" needs it'
            for name, kinds in _NEEDS.items()
            if self.kind in kinds and getattr(self, name) is None
        ]
        problems += [
            f'{name}: kind "{self.kind}" has no use for it; leave it out'
            for name, kinds in _USES.items()
            if self.kind not in kinds and getattr(self, name) is not None
        ]
        if self.kind == "yarn" and self.theta == 1:
            problems.append('theta: expected another number than 1 with kind "yarn", got 1.0')
        if self.kind == "longrope" and self.original_max_len == 1 and self.attention_factor is None:
            problems.append("original_max_len: expected 2 or more when attention_factor is not given, got 1")
        if problems:
            raise ValueError("\n".join(problems))

    def rotated(self, head_dim: int) -> int:
        """Give how many channels of a head `rotation` makes angles for, two to an angle.

        Args:
            head_dim: Width of a head.

        Example:
            >>> Rope(fraction=0.25).rotated(64), Rope(kind="none").rotated(64)
            (16, 0)
        """
        if self.kind in _FULL_WIDTH:
            return 0 if self.kind == "none" else head_dim
        return int(head_dim * self.fraction)

    def misfits(self, head_dim: int) -> list[str]:
        """Say what does not fit a head.

        Args:
            head_dim: Width of a head.

        Returns:
            A line for each problem.

        Example:
            >>> Rope(fraction=0.25).misfits(20)
            ['fraction: expected an even number of rotated channels, got 5, which is 0.25 of head_dim = 20']
        """
        width, problems = self.rotated(head_dim), []
        if self.kind == "none":
            return problems
        least = 4 if self.kind == "dynamic" else 2
        if width % 2 or width < least:
            expected = "an even number of rotated channels" if width % 2 else f"{least} or more rotated channels"
            source = f"{self.fraction} of head_dim" if width != head_dim else "head_dim"
            problems.append(f"fraction: expected {expected}, got {width}, which is {source} = {head_dim}")
        if self.longrope is not None and len(self.longrope.short_factor) != width // 2:
            problems.append(
                f"longrope.short_factor: expected {width // 2} numbers, one for each pair of rotated channels of "
                f"head_dim = {head_dim}, got {len(self.longrope.short_factor)}; the same holds for long_factor"
            )
        return problems
