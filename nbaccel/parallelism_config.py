"""A mix of parallelisms: names of a part that is still to come."""

from __future__ import annotations

from nbaccel.base.unsupported_names import MIXED_PARALLELISMS, missing_name_of

__all__ = [
    "DeepSpeedSequenceParallelConfig",
    "ParallelismConfig",
    "TorchContextParallelConfig",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
]

DeepSpeedSequenceParallelConfig = missing_name_of(
    "DeepSpeedSequenceParallelConfig", MIXED_PARALLELISMS, __name__
)
ParallelismConfig = missing_name_of("ParallelismConfig", MIXED_PARALLELISMS, __name__)
TorchContextParallelConfig = missing_name_of(
    "TorchContextParallelConfig", MIXED_PARALLELISMS, __name__
)
TorchTensorParallelConfig = missing_name_of(
    "TorchTensorParallelConfig", MIXED_PARALLELISMS, __name__
)
TorchTensorParallelPlugin = missing_name_of(
    "TorchTensorParallelPlugin", MIXED_PARALLELISMS, __name__
)
