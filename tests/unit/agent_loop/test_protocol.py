import pytest

from verl_ext.agent_loop.code_protocol import extract_code, interpreter_block
from verl_ext.agent_loop.protocol import MalformedCall, format_output


@pytest.mark.parametrize(
    ("text", "code", "why"),
    [
        ("<code>print(1)</code>", "print(1)", "plain"),
        ("First I compute.\n<code>\nprint(1)\n</code>", "\nprint(1)\n", "as written, line ends too"),
        ("<code>\n```python\nif a:\n    b()\n```\n</code>", "if a:\n    b()", "the fence goes, indentation stays"),
        ("<code>```\nx\n```</code>", "x", "a fence without language"),
        ("<code>```py3+\nx```</code>", "x", "a fence closed on the last line"),
        ("<code>s = '```'\nprint(s)</code>", "s = '```'\nprint(s)", "backticks that are no fence"),
        ("<code>```\na = '''\n```\n'''\n```</code>", "a = '''\n```\n'''", "only the outer fence"),
        ("Use <code> tags. <code>print(2)</code>", "print(2)", "the last block that opens"),
        ("<code>s = '</code>'</code>", "s = '</code>'", "up to the last stop"),
        ("<code>print(3)</code>\n", "print(3)", "characters behind the stop, from a token that carried them"),
    ],
)
def test_extract_code_takes_the_call_the_text_ends_in(text, code, why):
    assert extract_code(text) == code, why


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print(1)</code>", "</code> without <code>"),
        ("</code>", "</code> without <code>"),
        ("<code></code>", "empty <code></code>"),
        ("<code> \n\t</code>", "empty <code></code>"),
        ("<code>```python\n\n```</code>", "empty <code></code>"),
    ],
)
def test_a_call_that_cannot_be_run_says_why(text, message):
    with pytest.raises(MalformedCall, match=f"^FormatError: {message}$"):
        extract_code(text)


@pytest.mark.parametrize(
    ("stdout", "stderr", "full", "last_line"),
    [
        ("42\n", "", "42", "42"),
        ("", "", "(no output)", "(no output)"),
        (" \n", "\n", "(no output)", "(no output)"),
        (
            "1\n2\n",
            "Traceback:\n  line 1\nNameError: x\n",
            "1\n2\nTraceback:\n  line 1\nNameError: x",
            "1\n2\nNameError: x",
        ),
        ("", "a\nb", "a\nb", "b"),
    ],
)
def test_format_output_is_stdout_then_stderr(stdout, stderr, full, last_line):
    assert format_output(stdout, stderr) == full
    assert format_output(stdout, stderr, traceback="last_line") == last_line


def test_an_unknown_traceback_setting_is_refused_even_where_there_is_no_error():
    with pytest.raises(ValueError, match="'short'.*'full' or 'last_line'"):
        format_output("42", "", traceback="short")


def test_interpreter_block_stands_on_lines_of_its_own():
    assert "x</code>" + interpreter_block("42") + "y" == "x</code>\n<interpreter>\n42\n</interpreter>\ny"
