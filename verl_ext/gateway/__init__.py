"""An endpoint for agents that only know a base_url: they are trained unchanged, token in, token out.

`server.py` is the HTTP server, `rooms.py` one session's requests, `chat.py` and `anthropic.py` two formats of them.
`messages.py` compares conversations and says what the client is told of a turn, `template.py` makes the tokens between
two turns, and `session.py` keeps the tree of an episode's turns and gives its rows. `audit.py` tries a chat template.
`outside.py` is for agents in other processes: it takes a task of a run.
In: requests in OpenAI's form, and a function that generates. Out: answers, and the rows that the episode is trained on.
"""
