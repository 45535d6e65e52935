"""The interface between losses and the hand-written product of hidden states and class vectors: what each architecture's kernels have to do.

`core/hopper.py` implements it for compute capability 9.0, with `cuda/product_sm90.cu`; `PRODUCTS` in `core/score_product.py` is the table of implementations, from which `product_of` takes a device's.
"""

from abc import ABC, abstractmethod
import math
from typing import Optional

import torch
from torch import Tensor

from fusedloss.core.devices import Device


class ScoreProduct(ABC):
    """The product x wᵀ of one architecture, whose tiles leave the matrix units as what a loss needs of the scores.

    x is [N,H], w is [V,H], y holds N labels as int64. What a method writes is given to it: e and dz [N,V] in x's dtype, in bf16 where that is FP8,
    numbers of tiles of `classes` classes and of tokens in fp32. The target's score is left out, and written beside.
    """

    classes: int  # of a tile
    narrow: int  # of a maximum that `maxima` writes: a tile has several

    @abstractmethod
    def lacks(self, d: Device) -> str:
        "Say why a device has no such product; empty if it has."

    @abstractmethod
    def reason(self, dtype: torch.dtype, pitch: int, d: Device) -> str:  # elements from row to row
        "Say why such matrices are not taken on a device, as far as sizes tell; empty if they are."

    @abstractmethod
    def exponentials_reason(self, dtype: torch.dtype, pitch: int, d: Device) -> str:  # elements from row to row
        "Say why `exponentials` does not take such matrices on a device, as far as sizes tell; empty if it does."

    @abstractmethod
    def failure(self, dtype: torch.dtype, device: int, kernel: str = "score_statistics") -> str:
        "Say why a kernel cannot be launched on a GPU; empty if it can."

    @abstractmethod
    def matrices_reason(self, x: Tensor, w: Tensor, kernel: str = "score_statistics") -> str:
        "Say why a kernel does not take two matrices; empty if it does."

    @abstractmethod
    def statistics(
        self,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        stats: Tensor,
        target_z: Tensor,
        wanted: Optional[Tensor] = None,
        bias: Optional[Tensor] = None,  # fp32 [V, and on to whole tiles], added to x wᵀ
        units: Optional[Tensor] = None,  # fp32 [N], where x and w are in FP8: what multiplies each row of x wᵀ before
    ):
        "Write each row's maximum in a tile and Σ e^(z - maximum) to `stats [tiles,N,2]`; nothing where `wanted` is 0."

    @abstractmethod
    def moments(self, x: Tensor, w: Tensor, y: Tensor, stats: Tensor, moments: Tensor, target_z: Tensor):
        "Write `statistics`, and each tile's Σ e^(z - maximum) (z - maximum) to `moments [tiles,N]`."

    @abstractmethod
    def maxima(self, x: Tensor, w: Tensor, y: Tensor, stats: Tensor, maxima: Tensor, target_z: Tensor):
        "Write `statistics`, and the maximum of every `narrow` classes to `maxima [tiles · classes / narrow,N]`."

    @abstractmethod
    def exponentials(
        self,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        offsets: Tensor,
        e: Tensor,
        sums: Tensor,
        target_z: Tensor,
        log2_scale: float = math.log2(math.e),
        wanted: Optional[Tensor] = None,
        bias: Optional[Tensor] = None,  # as `statistics` takes it
        log2_cap: float = 0.0,  # c of a soft cap, over ln 2; 0: none
        units: Optional[Tensor] = None,  # as `statistics` takes them
    ):
        """Write e = 2^(x wᵀ · log2_scale - offset), 0 at the target and where the offset is inf, and `sums [tiles,N]` of it.

        With a soft cap the power is c tanh(x wᵀ · log2_scale / c) - offset; the sums are of 2 to it, e is that times 1 - tanh².
        """

    @abstractmethod
    def gradients(
        self,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        offsets: Tensor,
        coefs: Tensor,
        dz: Tensor,
        target_z: Tensor,
        log2_scale: float = math.log2(math.e),
        bias: Optional[Tensor] = None,  # as `statistics` takes it
    ):
        "Write coef · 2^(x wᵀ · log2_scale - offset), 0 at the target and where the offset is inf, to `dz`."

    @abstractmethod
    def entropy_gradients(
        self,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        offsets: Tensor,
        coefs: Tensor,
        slopes: Tensor,  # of the coefficient
        means: Tensor,  # natural units from the offset
        dz: Tensor,
        target_z: Tensor,
        log2_scale: float = math.log2(math.e),
    ):
        "Write `gradients` whose coefficient is coef + slope (mean - t / log2_scale), where t is the power of 2."
