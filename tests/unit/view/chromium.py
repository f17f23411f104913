"""A headless Chromium, driven by its DevTools protocol over aiohttp: no browser driver to install."""

import asyncio
import json
import re
import shutil
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Tab:
    """One page. `requests` has every address that it asked for, `errors` what its script or policy complained of."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self.socket, self.requests, self.errors, self.number = socket, [], [], 0
        self.answers: dict[int, asyncio.Future] = {}
        self.loaded = asyncio.Event()

    async def listen(self) -> None:
        async for message in self.socket:
            event = json.loads(message.data)
            if "id" in event:
                self.answers.pop(event["id"]).set_result(event)
            elif event["method"] == "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])
            elif event["method"] == "Page.loadEventFired":
                self.loaded.set()
            elif event["method"] == "Runtime.exceptionThrown":
                self.errors.append(str(event["params"]["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                self.errors.append(event["params"]["entry"]["text"])
            elif event["method"] == "Page.javascriptDialogOpening":
                self.errors.append("a dialog opened")
                await self.socket.send_json(
                    {"id": 0, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
                )

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        answer = self.answers[self.number] = asyncio.get_running_loop().create_future()
        await self.socket.send_json({"id": self.number, "method": method, "params": params})
        event = await asyncio.wait_for(answer, 30)
        assert "error" not in event, event
        return event["result"]

    async def open(self, address: str) -> None:
        self.loaded.clear()
        await self.call("Page.navigate", url=address)
        await asyncio.wait_for(self.loaded.wait(), 30)

    async def js(self, expression: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 10) -> Any:
        """Return the value of an expression once it is true."""
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    if value := await self.js(expression):
                        return value
                except AssertionError:  # the page is being replaced by the next
                    pass
                await asyncio.sleep(0.1)

    async def follow(self, expression: str) -> None:
        """Run an expression that opens another page, and wait for that page."""
        self.loaded.clear()
        await self.js(expression)
        await asyncio.wait_for(self.loaded.wait(), 30)

    async def click_on_curve(self, step: int) -> None:
        """Click, on the page of runs, the first curve at its value of a step, or next to it if that is on the edge."""
        x, y = await self.js(
            "(() => { const p = document.querySelector('.chart').plot; p.over.scrollIntoView({block: 'center'});"
            " const box = p.over.getBoundingClientRect(), [steps, values] = p.data;"
            " const inside = (at, size) => Math.min(Math.max(at, 2), size - 2);"
            f" return [box.left + inside(p.valToPos({step}, 'x'), box.width),"
            f" box.top + inside(p.valToPos(values[steps.indexOf({step})], 'y'), box.height)]; }})()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            clicks = {"button": "left", "clickCount": int(kind != "mouseMoved")}
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **clicks)

    async def token(self, position: int) -> dict[str, str]:
        """Return what the page of a response shows of a clicked token: name -> value."""
        await self.js(f"document.querySelectorAll('.tokens span')[{position}].click()")
        told = await self.js("document.getElementById('token').textContent")
        return dict(part.split(" ", 1) for part in told.split(" · "))

    async def key(self, name: str) -> None:
        text = {"text": "\r"} if name == "Enter" else {}
        codes = {
            "Enter": 13,
            "Tab": 9,
            "ArrowRight": 39,
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowDown": 40,
            "End": 35,
            "Home": 36,
        }
        for kind in ("keyDown", "keyUp"):
            code = codes[name]
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code, **text
            )


@asynccontextmanager
async def browser(folder: Path):
    """A tab; the browser and its profile (in `folder`) end with it."""
    quiet = ("--disable-background-networking", "--disable-component-update", "--no-first-run", "--disable-sync")
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={folder}")
    silent = {"stdout": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(PROGRAM, *options, *quiet, "about:blank", **silent)
    try:
        async with asyncio.timeout(40):
            port = None
            while port is None:
                found = re.search(rb"ws://127\.0\.0\.1:(\d+)/", await process.stderr.readline())
                port = found and int(found[1])
        drain = asyncio.create_task(process.stderr.read())
        async with aiohttp.ClientSession() as session:
            async with asyncio.timeout(40):
                page = None
                while page is None:  # it listens before it has one
                    async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                        page = next((each for each in await answer.json() if each["type"] == "page"), None)
                    await asyncio.sleep(0 if page else 0.1)
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                tab = Tab(socket)
                listener = asyncio.create_task(tab.listen())
                for domain in ("Page", "Network", "Runtime", "Log"):
                    await tab.call(f"{domain}.enable")
                yield tab
                listener.cancel()
        drain.cancel()
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
