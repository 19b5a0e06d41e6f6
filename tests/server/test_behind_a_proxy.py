"""docs/deployment.md: its nginx, before a server, hands on names, keys and streams over TLS."""

from __future__ import annotations

import re
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.processes import free_port
from tests.server.live import serving

PAGE = Path(__file__).parents[2] / "docs" / "deployment.md"

NAME = "models.example"

WHOLE = """
daemon off; pid {folder}/pid; error_log {folder}/log; worker_processes 1;
events {{ worker_connections 64; }}
http {{ access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
{server} }}
"""


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of the name, signed by itself."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", f"/CN={NAME}", "-addext"]
    command += [f"subjectAltName=DNS:{NAME}", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def configuration(folder: Path, port: int, url: str) -> Path:
    """The page's server block, with what is here in place of what a reader has."""
    cert, key = certificate(folder)
    block = re.search(r"```nginx\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    for theirs, ours in (
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/etc/ssl/models.example.pem", str(cert)),
        ("/etc/ssl/models.example.key", str(key)),
        ("http://127.0.0.1:8642", url),
    ):
        assert theirs in block
        block = block.replace(theirs, ours)
    path = folder / "nginx.conf"
    path.write_text(WHOLE.format(folder=folder, server=block))
    return path


@contextmanager
def proxy(path: Path) -> Iterator[None]:
    """nginx with a configuration; it ends with the block."""
    with subprocess.Popen(["nginx", "-p", str(path.parent), "-c", str(path)]) as process:
        try:
            yield
        finally:
            process.terminate()


@pytest.mark.skipif(
    not (shutil.which("nginx") and shutil.which("openssl")), reason="needs nginx and openssl"
)
def test_a_proxy_hands_on_names_keys_and_streams(tmp_path):
    port = free_port()
    with serving(tmp_path / "served", api_key="secret", allowed_hosts=(NAME,)) as live:
        path = configuration(tmp_path, port, live.url)
        tls = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        client = httpx.Client(
            base_url=f"https://127.0.0.1:{port}",
            transport=httpx.HTTPTransport(verify=tls, retries=10),
            headers={"Host": NAME, "Authorization": "Bearer secret"},
            timeout=180,
        )
        with proxy(path), client:
            to = {"extensions": {"sni_hostname": NAME}}
            assert client.get("/health", **to).status_code == 200
            said = {"prompt": "import ", "max_tokens": 16, "stream": True, "ignore_eos": True}
            page = {"Origin": f"https://{NAME}"}  # the server's own, as the browser has it
            with client.stream("POST", "/v1/completions", json=said, headers=page, **to) as answer:
                lines = [line for line in answer.iter_lines() if line]
            assert answer.status_code == 200 and lines[-1] == "data: [DONE]" and len(lines) > 4
            refused = client.get("/v1/models", headers={"Authorization": "Bearer no"}, **to)
            assert refused.status_code == 401
            elsewhere = client.get("/v1/models", headers={"Host": "elsewhere.example"}, **to)
            assert elsewhere.status_code == 403, elsewhere.text
