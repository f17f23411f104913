"""Weights on their way to another process, bit for bit: as torch sends them, and by verl's buckets."""

import faulthandler
import hashlib
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from queue import Empty

from scripts.gpu_acceptance.stage import Context, Row

TIMEOUT_S = 100  # below the stage's limit, so that a receiver that died is told by its own error
BUCKETS_S = 200  # the same, with verl's imports in the receiver


def _random_bits(context: Context):
    """bf16 of any bits, NaN and -0 included: 3 GB on a GPU, 3 MB on a CPU."""
    import torch

    count = (3 * 10**9 if context.is_cuda else 3 * 10**6) // 2
    generator = torch.Generator(context.device).manual_seed(0)
    bits = torch.randint(-(2**15), 2**15, (count,), dtype=torch.int16, device=context.device, generator=generator)
    return bits.view(torch.bfloat16)


def digest(tensor) -> str:
    """SHA-256 of the bytes, copied to the host in pieces."""
    import torch

    seen = hashlib.sha256()
    for part in tensor.view(torch.int16).split(2**27):
        seen.update(part.cpu().numpy().data)
    return seen.hexdigest()


def receive(inbox, outbox) -> None:
    """In the other process: a copy of what comes, its digest, and that it was seen."""
    tensor = inbox.get(timeout=TIMEOUT_S)
    copy = tensor.clone()
    del tensor
    outbox.put(digest(copy))


def check_weights(context: Context) -> Iterator[Row]:
    """torch's own way between processes, which vLLM and verl build on: CUDA IPC, or shared memory on a CPU."""
    import torch.multiprocessing as multiprocessing

    tensor = _random_bits(context)
    expected = digest(tensor)
    spawn = multiprocessing.get_context("spawn")
    inbox, outbox = spawn.Queue(), spawn.Queue()
    process = spawn.Process(target=receive, args=(inbox, outbox))
    process.start()
    start = time.monotonic()
    inbox.put(tensor)
    seen = outbox.get(timeout=TIMEOUT_S)
    seconds = time.monotonic() - start
    process.join(TIMEOUT_S)
    same = seen == expected
    about = f"{tensor.nbytes / 1e9:.3g} GB to another process"
    yield Row(about, "bit-equal", f"{'bit-equal' if same else 'other bits'}, {seconds:.1f} s with its start", same)


def receive_buckets(handle: str, device: str, outbox) -> None:
    """In the other process: verl's receiver, and the digest of each weight."""
    faulthandler.dump_traceback_later(BUCKETS_S - 20)
    import torch
    import verl  # noqa: F401  sets the platform
    from verl.utils.device import is_support_ipc
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

    receiver = BucketedWeightReceiver(handle, device=torch.device(device), use_shm=not is_support_ipc())
    digests: dict[str, str] = {}
    receiver.receive_weights(lambda weights, is_last: digests.update({name: digest(each) for name, each in weights}))
    outbox.put(digests)


def check_buckets(context: Context) -> Iterator[Row]:
    """verl's sender with buckets of 512 MB: small weights share one, one of 3 GB goes beside them."""
    import asyncio
    import threading

    import torch.multiprocessing as multiprocessing
    import verl  # noqa: F401  sets the platform
    from verl.utils.device import is_support_ipc
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    large = _random_bits(context)
    weights = {"first": large[: len(large) // 30], "large": large, "odd": large[:7], "last": large[-len(large) // 40 :]}
    expected = {name: digest(weight) for name, weight in weights.items()}
    spawn = multiprocessing.get_context("spawn")
    outbox = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:  # the path of a socket ends at 107 characters
        handle = f"ipc://{folder}/weights.sock"
        device = "cuda:0" if context.is_cuda else "cpu"
        process = spawn.Process(target=receive_buckets, args=(handle, device, outbox))
        process.start()
        sender = BucketedWeightSender(handle, bucket_size_mb=512, use_shm=not is_support_ipc())
        start, errors = time.monotonic(), []

        def send() -> None:
            try:
                asyncio.run(sender.async_send_weights(iter(weights.items())))
            except Exception as error:  # whatever it is: it is raised below
                errors.append(error)

        # In a thread: the sender waits for the receiver as long as it takes, whether that lives or not.
        sending = threading.Thread(target=send, daemon=True)
        sending.start()
        seen, ended = None, False
        while seen is None and not (errors or ended) and time.monotonic() < start + BUCKETS_S:
            ended = process.exitcode is not None
            with suppress(Empty):
                seen = outbox.get(timeout=1)
        if seen is not None:
            sending.join(10)
            process.join(10)
        if errors:
            raise errors[0]
        if seen is None:
            seconds = time.monotonic() - start
            raise TimeoutError(f"no digests after {seconds:.0f} s; exit status of the receiver: {process.exitcode}")
    seconds = time.monotonic() - start
    wrong = [name for name in expected if seen.get(name) != expected[name]]
    total = sum(weight.nbytes for weight in weights.values()) / 1e9
    text = f"other bits in {wrong}" if wrong else f"bit-equal, {seconds:.1f} s with its start"
    yield Row(f"{total:.3g} GB by verl's buckets", "bit-equal", text, not wrong)
