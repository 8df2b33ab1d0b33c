"""A client of ``/v1/files`` and ``/v1/batches``, of weft or any other server that has them."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import httpx

from weft.batch.http import CONNECT_TIMEOUT_S
from weft.batch.journal import sync_folder
from weft.core.addresses import base_of
from weft.core.errors import ConfigError, WeftError, short

TIMEOUT_S = 120.0  # without a byte
AWAY = (502, 503, 504)


class ServerAwayError(WeftError):
    """The server does not answer, or cannot at present."""

    code = "server_away"


class RefusedError(WeftError):
    """The server has refused what it was asked.

    Attributes:
        error_code: of its error object; "" without one.
    """

    def __init__(self, message: str, error_code: str = "") -> None:
        super().__init__(message)
        self.error_code = error_code


class BatchClient:
    """Uploads files, creates and watches batches, fetches results.

    Every method raises ServerAwayError or RefusedError.

    Args:
        url: of the server, with or without ``/v1``.

    Raises:
        ConfigError: the URL is not one of a server, or the key cannot be sent.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = base_of(url)
        self._keyed = bool(api_key)
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout)
        except ValueError:
            raise ConfigError("The key must be printable ASCII.", param="api_key") from None

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def upload(self, path: Path) -> str:
        """Upload the input of a batch; the id of the file. Raises ConfigError without one."""
        try:
            with path.open("rb") as file:
                form = {"file": (path.name, file, "application/jsonl")}
                answer = self._ask("POST", "/v1/files", data={"purpose": "batch"}, files=form)
        except OSError as error:
            raise ConfigError(f"Cannot read '{path}': {error.strerror}.", param="input") from None
        return str(answer["id"])

    def delete_file(self, file_id: str) -> None:
        """Forget a file."""
        self._ask("DELETE", f"/v1/files/{file_id}")

    def create(self, file_id: str, endpoint: str, window: str) -> dict[str, Any]:
        """Create a batch."""
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
        return self._ask("POST", "/v1/batches", json=body)

    def batch(self, batch_id: str) -> dict[str, Any]:
        """A batch as it is now."""
        return self._ask("GET", _path(batch_id))

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """Ask for the end of a batch."""
        return self._ask("POST", f"{_path(batch_id)}/cancel")

    def batches(self, limit: int) -> tuple[list[dict[str, Any]], bool]:
        """The newest batches, and whether there are more."""
        page = self._ask("GET", "/v1/batches", params={"limit": limit})
        return list(page["data"]), bool(page.get("has_more"))

    def download(self, file_id: str, target: Path) -> int:
        """Write the bytes of a file; how many. The target has all of them, or is as it was.

        Raises:
            ConfigError: it cannot be written.
        """
        partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
        try:
            with partial.open("xb") as file:
                self._stream(f"/v1/files/{file_id}/content", file)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            partial.replace(target)
            sync_folder(target.parent)
        except OSError as error:
            message = f"Cannot write '{target}': {error.strerror}."
            raise ConfigError(message, param="output") from None
        finally:
            partial.unlink(missing_ok=True)
        return size

    def _stream(self, path: str, file: Any) -> None:
        try:
            with self._http.stream("GET", path) as answer:
                if answer.status_code != httpx.codes.OK:
                    answer.read()
                    raise self._refusal(answer)
                for piece in answer.iter_bytes(2**20):
                    file.write(piece)
        except httpx.HTTPError as error:
            raise self._away(error) from None

    def _ask(self, method: str, path: str, **given: Any) -> dict[str, Any]:
        try:
            answer = self._http.request(method, path, **given)
        except httpx.HTTPError as error:
            raise self._away(error) from None
        if answer.status_code != httpx.codes.OK:
            raise self._refusal(answer)
        try:
            found = answer.json()
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise RefusedError(f"{self.url}{path} does not answer as a server of batches does.")
        return found

    def _away(self, error: httpx.HTTPError) -> ServerAwayError:
        if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
            return ServerAwayError(
                f"No server answers at {self.url} ({short(error) or type(error).__name__}); start "
                "one with: weft serve, or name another with --url."
            )
        what = short(error) or type(error).__name__
        return ServerAwayError(f"The connection to {self.url} failed: {what}.")

    def _refusal(self, answer: httpx.Response) -> WeftError:
        """What an answer that is none says, and what to do about it."""
        message, code = _said(answer)
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            if not self._keyed:
                message = f"{self.url} wants a key: give --api-key KEY, or set OPENAI_API_KEY."
                return RefusedError(message, code)
            message = f"{self.url} does not take the key of --api-key or OPENAI_API_KEY: {message}"
            return RefusedError(message, code)
        if answer.status_code == httpx.codes.NOT_FOUND and code == "batch_not_found":
            return RefusedError(f"{message} 'weft batches list' shows those of your key.", code)
        if answer.status_code in (404, 405) and code not in ("file_not_found", "batch_not_found"):
            return RefusedError(
                f"{self.url} has no batches ({answer.status_code}: {message}). 'weft batch FILE "
                f"-o RESULTS --url {self.url}' asks it line by line.",
                code,
            )
        if answer.status_code in AWAY:
            return ServerAwayError(f"{self.url} cannot answer at present: {message}")
        return RefusedError(message, code)


def _path(batch_id: str) -> str:
    if not batch_id or not all(c.isalnum() or c in "_-" for c in batch_id):
        raise ConfigError(f"'{short(batch_id, 60)}' is not the id of a batch.", param="id")
    return f"/v1/batches/{batch_id}"


def _said(answer: httpx.Response) -> tuple[str, str]:
    """Message and code of an error object, or what else the body says."""
    try:
        error = answer.json()["error"]
        return str(error["message"]), str(error.get("code") or "")
    except (ValueError, KeyError, TypeError):
        text = short(answer.text) or answer.reason_phrase
        return f"{text.rstrip('.')}.", ""
