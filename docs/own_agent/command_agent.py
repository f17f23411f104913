"""Ask once, as a program that knows nothing of the run: retool.agent.run=[python,docs/own_agent/command_agent.py]"""

import json
import os
import sys

import openai

task = json.load(sys.stdin)
client = openai.OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY
client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=task["messages"])
