import copy
import pickle


def test_the_device_id_serves_both_of_verls_uses(cpu_platform):
    import torch
    from verl.utils.device import get_device_id, get_device_name

    device = get_device_id()
    assert torch.ones(1).to(device).device.type == "cpu"
    assert f"{get_device_name()}:{device}" == "cpu:0"


def test_the_device_id_can_be_copied_and_sent(cpu_platform):
    from verl_ext.cpu.platform import CpuDeviceId

    for twin in (copy.deepcopy(CpuDeviceId()), pickle.loads(pickle.dumps(CpuDeviceId()))):
        assert twin == "cpu" and f"{twin}" == "0"


def test_verl_finds_the_functions_of_torch_cuda_that_it_calls(cpu_platform):
    import torch
    from verl.utils.device import get_torch_device

    device = get_torch_device()
    assert device.memory_allocated() == device.max_memory_reserved(0) == 0
    device.empty_cache()
    available, total = device.mem_get_info()
    assert 0 < available <= total
    state = device.get_rng_state()
    drawn = torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)
