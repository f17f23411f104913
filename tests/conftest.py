"""For all tests: what a shell may have told this process to ignore, and so all that the tests start."""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup
