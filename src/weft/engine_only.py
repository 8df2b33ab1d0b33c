"""``weft serve --engine-only``: an engine for request planes on other machines, and no HTTP."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Any

from weft.core.addresses import format_address
from weft.core.config import EngineConfig
from weft.core.early import Starter
from weft.core.logs import notice
from weft.core.process import beat_s
from weft.core.sealed import listen_with_key, read_key
from weft.server.options import ServerOptions
from weft.supervise import on_signals, run_kept


def serve_engine(
    settings: Mapping[str, Any], config: EngineConfig, options: ServerOptions, start: Starter
) -> int:
    """Serve request planes elsewhere until SIGINT or SIGTERM; return the exit code.

    Raises:
        ConfigError: the address or the key cannot be used.
        WeftError: what kept the engine from starting, or processes that died again and again.
    """
    key = read_key(options.ring_key_file)
    assert options.ring_listen is not None, "the options were checked"
    names = {"param": "ring_listen", "key_param": "ring_key_file"}
    with listen_with_key(options.ring_listen, key, callers="request planes", **names) as listener:
        return asyncio.run(_supervise(settings, config, options, listener, key, start))


async def _supervise(
    settings: Mapping[str, Any],
    config: EngineConfig,
    options: ServerOptions,
    listener: socket.socket,
    key: bytes,
    start: Starter,
) -> int:
    from weft.engine.keeper import EngineKeeper
    from weft.engine.kv_file import create_kv_file
    from weft.engine.links import EngineLinks
    from weft.ring.agent_keeper import AgentKeeper
    from weft.ring.segment import ring_of

    signals = on_signals()
    rings = [ring_of(config) for _ in range(options.ring_planes)]
    beat = beat_s(options.watchdog_s, options.stalled_s)
    links = EngineLinks(rings, None, beat, create_kv_file())
    engines = EngineKeeper(
        settings,
        links,
        start,
        standby=options.standby,
        watchdog_s=options.watchdog_s,
        on_next=lambda served: agent.tell(served.to_json()),
    )
    card: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    given = {
        "key": key.hex(),
        "timeout_s": options.ring_timeout_s,
        "tokenizer": config.tokenizer,
        "chat_template": config.chat_template,
        "log_level": config.log_level,
        "log_format": config.log_format,
    }
    agent = AgentKeeper(listener, rings, given, card, options.watchdog_s)
    announcing = asyncio.create_task(_announce(card, listener))
    try:
        return await run_kept([agent], signals, options.drain_timeout_s, engines, card)
    finally:
        announcing.cancel()


async def _announce(card: asyncio.Future[str], listener: socket.socket) -> None:
    """Say where request planes connect, once there is an engine."""
    from weft.core.served import ServedModel

    served = ServedModel.from_json(await asyncio.shield(card))
    address = format_address(listener.getsockname())
    notice(f"an engine with {served.name} for request planes at {address}")
    for line in (
        served.threads,
        served.host_attention,
        served.kv_disk,
        served.halves,
        served.scheduling,
    ):
        if line:
            notice(line)
