"""Graphs without a GPU: a graph is its function, whose results lie in the same tensors each time."""

from torch import Tensor

from sonoro.runtime.graphs import GraphPool, Recorded


class FunctionPool(GraphPool):
    def can_record(self, device):
        return True

    def record(self, function, device):
        outputs = function()

        def replay():
            for kept, made in zip(_parts(outputs), _parts(function()), strict=True):
                kept.copy_(made)

        return Recorded(replay, outputs, 0)

    def recover(self, device):
        pass


def _parts(outputs):
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [part for part in outputs if isinstance(part, Tensor)]
