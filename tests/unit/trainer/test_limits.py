"""How long RL's ranks wait for each other, and how many calls a server takes."""

import inspect
from types import SimpleNamespace

from omegaconf import OmegaConf

from verl_ext.trainer.limits import obey_nccl_timeout


def test_ranks_wait_as_long_as_the_run_says():
    """With a stand-in for verl.workers.engine_workers: the group is there before a `TrainingWorker` could make one."""

    class ActorRolloutRefWorker:
        config = OmegaConf.create({"nccl_timeout": 3600})

        def init_model(self):
            asked.append("init_model")

        init_model.noted = "by verl's register"

    asked = []
    module = SimpleNamespace(
        ActorRolloutRefWorker=ActorRolloutRefWorker,
        initialize_global_process_group_ray=lambda timeout_second: asked.append(timeout_second),
    )
    obey_nccl_timeout(module)
    ActorRolloutRefWorker().init_model()
    assert asked == [3600, "init_model"]
    assert ActorRolloutRefWorker.init_model.noted == "by verl's register"


def test_verls_worker_is_the_one_that_is_replaced():
    import verl  # noqa: F401
    from verl.utils.distributed import initialize_global_process_group_ray
    from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

    assert "initialize_global_process_group_ray(timeout_second=None)" in inspect.getsource(TrainingWorker)
    assert "if not torch.distributed.is_initialized():" in inspect.getsource(initialize_global_process_group_ray)
    assert ActorRolloutRefWorker.init_model.__code__.co_name == "init_model_in_group", "verl_ext puts its own there"


def test_torch_itself_has_no_time_out_for_an_hour():
    """The limit of a process group that asks for none; the number in the docstring."""
    from torch.distributed import distributed_c10d as torchs

    assert torchs._get_default_timeout(torchs.Backend("cpu:gloo,cuda:nccl")).total_seconds() == 30 * 60
