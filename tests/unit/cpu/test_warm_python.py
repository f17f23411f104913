"""If there is an accelerator, no process is forked from one that has imported vLLM."""

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


def test_the_executable_runs_where_pythons_path_has_a_space(tmp_path):
    """Which the first line of a script cannot have."""
    from verl_ext.cpu.warm_python import stub

    folder = tmp_path / "my $HOME folder"
    folder.mkdir()
    (folder / "python").symlink_to(sys.executable)
    script, code = tmp_path / "stub", "import sys; print(sys.argv[1:])"
    for python in (str(folder / "python"), sys.executable):
        script.write_text(stub(python, str(tmp_path / "nobody")))
        script.chmod(0o700)
        done = subprocess.run([script, "-I", "-c", code, "a b", "$HOME"], capture_output=True, text=True, timeout=60)
        assert done.stdout == "['a b', '$HOME']\n", done.stderr
