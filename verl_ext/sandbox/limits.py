"""What client and server of the sandbox must agree on: each number and name in one place.

What server and worker share is in `server/wire.py`: a worker imports nothing from here (server/zygote.py).
"""

SERVER_NAME = "verl-retool-sandbox"  # in the header `Server`: only our server can do what goes beyond SandboxFusion's
TOKEN_VARIABLE = "SANDBOX_TOKEN"  # environment variable with the token that every request must carry
READY = "sandbox ready on "  # begins the line that a server prints when it answers; its URL follows

MAX_TIMEOUT_S = 86400.0  # of one program
ARCHIVE_S = 70.0  # for a worker to unpack or pack the files of a box; after that it is a failure of ours
WORKER_GRACE_S = 3.5  # a worker that says nothing for this long after the program's time limit is lost
CONTROL_S = 1.5  # for the control program that runs after a program was lost
# Time beyond queueing and running before the client counts an attempt as lost. So it is the server that reports a lost
# program; the rest is for the way there and back.
ANSWER_GRACE_S = WORKER_GRACE_S + CONTROL_S + 3.0
# So many losses of a program in a row are its own doing. Where no layer keeps another program from killing its worker,
# it takes more, each in another attempt of the client, after a pause.
LOSSES_TO_BLAME, LOSSES_WITHOUT_ISOLATION = 2, 4
MAX_ATTEMPTS = LOSSES_WITHOUT_ISOLATION  # of the client, for one call

CONTROL_PROGRAM, CONTROL_OUTPUT = "print(6 * 7)", "42\n"  # harms nothing, and shows whether a sandbox works
