import subprocess
import sys

import psutil

from tests.processes import kill_tree

POOL = """
import os, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from verl_ext.runs.processes import end_with_parent
with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=end_with_parent) as pool:
    print(pool.submit(os.getpid).result(), flush=True)
    pool.submit(time.sleep, 60).result()
"""


def test_a_pools_process_ends_when_the_one_that_has_the_pool_is_killed():
    process = subprocess.Popen([sys.executable, "-c", POOL], stdout=subprocess.PIPE)
    worker = psutil.Process(int(process.stdout.readline()))
    try:
        process.kill()
        process.wait()
        assert psutil.wait_procs([worker], timeout=10)[0]
    finally:
        kill_tree(worker.pid)
