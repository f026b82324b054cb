"""Certificates for servers that speak TLS."""

from datetime import UTC, datetime, timedelta

import pytest
import trustme

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


class Certificates(dict[str, str]):
    """Names of certificates and keys → their files."""

    @property
    def of_server(self):
        """Options of a server that speaks TLS and asks clients for certificates."""
        return [
            *("--tls-cert-file", self["server"], "--tls-key-file", self["server-key"]),
            *("--tls-ca-cert-file", self["authority"], "--tls-auth-clients", "yes"),
        ]

    @property
    def of_client(self):
        """Arguments of a client that may talk to such a server."""
        return {
            "ssl": True,
            "ssl_ca_certs": self["authority"],
            "ssl_certfile": self["client"],
            "ssl_keyfile": self["client-key"],
        }


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    """Files: a server's and a client's certificates of one authority, and another authority's."""
    folder = tmp_path_factory.mktemp("certificates")
    authority, stranger = trustme.CA(), trustme.CA()
    files = {}
    for name, made in (("authority", authority), ("stranger", stranger)):
        files[name] = str(folder / f"{name}.pem")
        made.cert_pem.write_to_path(files[name])
    for name, made in (
        ("server", authority.issue_cert("127.0.0.1", "localhost")),
        ("expired", authority.issue_cert("localhost", not_before=LONG_AGO, not_after=LONG_AGO + timedelta(days=1))),
        ("client", authority.issue_cert("worker@example.org")),
        ("impostor", stranger.issue_cert("worker@example.org")),
    ):
        files[name] = str(folder / f"{name}.pem")
        files[f"{name}-key"] = str(folder / f"{name}-key.pem")
        for number, blob in enumerate(made.cert_chain_pems):
            blob.write_to_path(files[name], append=number > 0)
        made.private_key_pem.write_to_path(files[f"{name}-key"])
    return Certificates(files)


@pytest.fixture
def short_opening(durations):
    durations(opening=0.5)
