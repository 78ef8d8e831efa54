"""A mix of parallelisms: names of a part that is still to come."""

from __future__ import annotations

from nbaccel._later import PARALLELISMS, later

__all__ = [
    "DeepSpeedSequenceParallelConfig",
    "ParallelismConfig",
    "TorchContextParallelConfig",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
]

DeepSpeedSequenceParallelConfig = later("DeepSpeedSequenceParallelConfig", PARALLELISMS, __name__)
ParallelismConfig = later("ParallelismConfig", PARALLELISMS, __name__)
TorchContextParallelConfig = later("TorchContextParallelConfig", PARALLELISMS, __name__)
TorchTensorParallelConfig = later("TorchTensorParallelConfig", PARALLELISMS, __name__)
TorchTensorParallelPlugin = later("TorchTensorParallelPlugin", PARALLELISMS, __name__)
