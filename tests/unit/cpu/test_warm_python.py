"""Where there is an accelerator, no process is forked from one that has imported vLLM."""

import os
import subprocess
import sys


def test_beside_an_accelerator_the_command_is_a_real_python():
    code = "import sys; print('torch' in sys.modules, sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-m", "verl_ext.cpu.warm_python", "-c", code, "--option", "value"],
        env=os.environ | {"VERL_PLATFORM": "nvidia"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "False ['--option', 'value']\n", done.stderr
