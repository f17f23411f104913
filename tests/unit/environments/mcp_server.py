"""An MCP server for tests: over stdio by the protocol itself, or, with a port, over HTTP by the package `mcp`.

`--mute` answers nothing, and `--deaf` ignores its end.
"""

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

items: list[str] = []


def put(item: str) -> str:
    """Put an item on the pile of this process."""
    if not isinstance(item, str):
        raise ValueError(f"put wants a text, got {item!r}")
    items.append(item)
    return f"{len(items)} items, the newest is {item}"


def fail(message: str) -> str:
    """Fail."""
    raise ValueError(message)


def wait(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "done"


def die() -> str:
    """End the process."""
    os._exit(3)


def fork() -> str:
    """Start a process that outlives this one."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdin=subprocess.DEVNULL)
    return f"{os.getpid()} {child.pid}"


def show(size: int) -> list[dict]:
    """Show a picture, and a text of some size."""
    return [{"type": "image", "data": "AAAA", "mimeType": "image/png"}, {"type": "text", "text": "x" * size}]


def environment() -> str:
    """Show where the process runs."""
    return f"{os.getcwd()} {os.environ.get('COLOUR')} {os.environ.get('SECRET')}"


def look(place: dict, limit: Any = None) -> str:
    """Look."""
    return json.dumps([place, limit])


def lie() -> str:
    """Answer without what its output schema promises."""
    return "4"


TOOLS = {tool.__name__: tool for tool in (put, fail, wait, die, fork, show, environment, look, lie)} | {"bad name": die}
TYPES = {str: {"type": "string"}, float: {"type": "number"}, int: {"type": "integer"}}
TYPES |= {
    dict: {"$ref": "#/$defs/Place"},
    Any: {"default": None, "anyOf": [{"type": "integer"}, {"type": "null"}], "title": "Limit"},
}
PLACE = {"properties": {"tags": {"items": {"type": "string"}, "type": "array"}}, "type": "object"}


def schema(name: str) -> dict[str, Any]:
    wanted = {each: TYPES[kind] for each, kind in TOOLS[name].__annotations__.items() if each != "return"}
    required = [each for each in wanted if "default" not in wanted[each]]
    form = {"type": "object", "properties": wanted, "required": required, "additionalProperties": False}
    if name == "look":
        form["$defs"] = {"Place": PLACE}
    promised = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    output = {"outputSchema": promised} if name == "lie" else {}
    return {"name": name, "description": TOOLS[name].__doc__, "inputSchema": form, **output}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        info = {"name": "test", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":  # a page for each tool
        names = list(TOOLS)
        place = int(params.get("cursor") or 0)
        page = {"tools": [schema(names[place])]}
        return page | ({"nextCursor": str(place + 1)} if place + 1 < len(names) else {})
    if method != "tools/call":
        raise LookupError(-32601, f"no method {method}")
    if params["name"] not in TOOLS:
        raise LookupError(-32602, f"unknown tool {params['name']}")
    try:
        said = TOOLS[params["name"]](**params["arguments"])
    except (ValueError, TypeError) as error:
        return {"content": [{"type": "text", "text": str(error)}], "isError": True}
    return {"content": said if isinstance(said, list) else [{"type": "text", "text": said}]}


def serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            try:
                said = {"result": answer(request["method"], request.get("params") or {})}
            except LookupError as error:
                said = {"error": {"code": error.args[0], "message": error.args[1]}}
            print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **said}), flush=True)


def serve_http(port: int) -> None:
    import anyio
    from mcp.server.mcpserver import MCPServer

    async def wait(seconds: float) -> str:
        await anyio.sleep(seconds)
        return "done"

    server = MCPServer("test")
    for name, tool in (TOOLS | {"wait": wait}).items():
        server.add_tool(tool, name=name, structured_output=False)
    server.run("streamable-http", port=port)


if __name__ == "__main__":
    print("the server starts", file=sys.stderr, flush=True)
    if sys.argv[1:] == ["--mute"]:
        time.sleep(600)
    elif sys.argv[1:] == ["--deaf"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        serve()
        time.sleep(600)
    elif sys.argv[1:]:
        serve_http(int(sys.argv[1]))
    else:
        serve()
