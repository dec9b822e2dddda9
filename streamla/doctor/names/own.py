"""streamla's own kernels: `streamla_<stage>_<implementation>...`, tuned to waste no rows."""

from __future__ import annotations

from streamla.doctor.names.grammar import Family

OWN: tuple[Family, ...] = ()
