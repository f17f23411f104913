"""Gathered weights that stay between the micro-batches of an update, if a run says that memory allows it."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from verl_ext.versions import VERL, require_versions


def keep_weights(engines: ModuleType) -> None:
    """verl/workers/engine/fsdp/transformer_impl.py:693 `_gradient_sync_context` (0.9.1): FSDP2 gathers weights once.

    With `fsdp_config: {reshard_after_forward: false, use_no_sync_for_gradient_accumulation: true}` all weights are
    present at the end of a forward pass, and gradients wait for the last micro-batch. FSDP2 nevertheless frees the
    weights in each backward pass, and each forward pass gathers them again; here, only the last backward pass frees
    them. Other runs do not change.
    """
    require_versions(VERL, "verl_ext/trainer/gradient_accumulation.py")
    engine = engines.FSDPEngine
    gradient_sync_context = engine._gradient_sync_context

    @contextmanager
    def keeping(self: Any, *, is_last_micro_batch: bool) -> Iterator[None]:
        config = self.engine_config
        defers = getattr(config, "use_no_sync_for_gradient_accumulation", True)  # as verl's own
        if defers and not getattr(config, "reshard_after_forward", True) and engines.fsdp_version(self.module) == 2:
            self.module.set_reshard_after_backward(is_last_micro_batch)
        with gradient_sync_context(self, is_last_micro_batch=is_last_micro_batch):
            yield

    engine._gradient_sync_context = keeping
