"""An MCP server with one tool, over standard input and output, for clients that start one."""

import json
import sys
from typing import Any

TOOL = {
    "name": "colour_of",
    "description": "Return the colour of a fruit.",
    "inputSchema": {
        "type": "object",
        "properties": {"fruit": {"type": "string", "enum": ["apple", "plum"]}},
        "required": ["fruit"],
    },
}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        info = {"name": "fruit", "version": "1"}
        version = params.get("protocolVersion")
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        text = f"The colour of {params['arguments']['fruit']} is mauve."
        return {"content": [{"type": "text", "text": text}]}
    return {}


for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        result = answer(asked["method"], asked.get("params") or {})
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
