"""Step buffers, allocated once at the largest size; a step works on views of their first rows.

Views are kept per row count, because making a dozen of them in each layer of each decode step costs more than the ops.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace

import torch

from deepinfer.errors import CapacityError

_KEPT_VIEWS = 32


class Buffers:
    """Named buffers of [max_rows, *shape]. `rows(n)` gives a namespace of [n, *shape] views."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.max_rows, self.device = max_rows, device
        self._whole: dict[str, torch.Tensor] = {}
        self._views: OrderedDict[int, SimpleNamespace] = OrderedDict()
        self._derived: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {}

    def derive(self, name: str, source: str, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Adds a further view of a defined buffer, e.g. some of its columns."""
        self._derived[name] = (source, view)
        self._views.clear()

    def define(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Adds a buffer; u8 pairs of quantised activations come from `define_quantised`."""
        self.add(name, torch.zeros(self.max_rows, *shape, dtype=dtype, device=self.device))

    def add(self, name: str, whole: torch.Tensor) -> None:
        """Adds a tensor [max_rows, ...] that is already filled."""
        self._whole[name] = whole
        self._views.clear()

    def define_quantised(self, name: str, width: int) -> None:
        """Adds fp8_32 codes `name` [width] and scales `name_scale` [width / 32]."""
        self.define(name, (width,), torch.uint8)
        self.define(f"{name}_scale", (width // 32,), torch.uint8)

    def rows(self, count: int) -> SimpleNamespace:
        """Views of the first `count` rows of every buffer. CapacityError where they have fewer."""
        views = self._views.get(count)
        if views is None:
            if count > self.max_rows:
                raise CapacityError(f"a step of {count} rows exceeds the {self.max_rows} that its buffers were made for")
            views = SimpleNamespace(**{name: whole[:count] for name, whole in self._whole.items()})
            for name, (source, view) in self._derived.items():
                setattr(views, name, view(getattr(views, source)))
            self._views[count] = views
            if len(self._views) > _KEPT_VIEWS:
                self._views.popitem(last=False)
        else:
            self._views.move_to_end(count)
        return views

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._whole.values())
