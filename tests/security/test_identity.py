"""Identities in certificates and the rights of roles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticps.security.identity import OF_APPLICATIONS, Act, Identity, NotAuthorised, Role, identity_among

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True)


@given(names, st.sampled_from(Role), names | st.just("*"), names | st.just("*"))
def test_an_identity_survives_printing_and_parsing(cluster: str, role: Role, name: str, app: str) -> None:
    identity = Identity(cluster, role, name, app if role in OF_APPLICATIONS else "")
    assert Identity.parse(str(identity)) == identity


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "spiffe://elasticps/",
        "spiffe://elasticps/train/server",
        "spiffe://elasticps/train/server/",
        "spiffe://elasticps/train/server/s0/",
        "spiffe://elasticps/train/server/app/s0",
        "spiffe://elasticps/train/worker/w0",
        "spiffe://elasticps/train/worker//w0",
        "spiffe://elasticps/train/reader/r0",
        "spiffe://elasticps/train/worker/a/b/w0",
        "spiffe://elasticps/train/root/me",
        "spiffe://elasticps/*/server/s0",
        "spiffe://elasticps//server/s0",
        "spiffe://elasticps.example/train/server/s0",
        "https://elasticps/train/server/s0",
        "spiffe://elasticps/train/server/s0\n",
        "spiffe://elasticps/train/server/s0?x",
        "spiffe://elasticps/train/server/%73",
        "spiffe://elasticps/train/server/**",
        "spiffe://elasticps/train/Server/s0",
    ],
)
def test_an_invalid_identity_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Identity.parse(uri)
    with pytest.raises(NotAuthorised):
        identity_among([uri])


def test_a_certificate_has_one_identity() -> None:
    one = "spiffe://elasticps/train/server/s0"
    assert identity_among([one]) == Identity("train", Role.SERVER, "s0")
    for uris in ([], [one, one]):
        with pytest.raises(NotAuthorised, match="instead of one"):
            identity_among(uris)


@pytest.mark.parametrize(
    ("uri", "right"),
    [
        ("worker/ads/w0", True),
        ("worker/ads/*", True),
        ("worker/*/*", True),
        ("worker/ads/w1", False),
        ("worker/shop/w0", False),
        ("worker/shop/*", False),
        ("server/w0", False),
        ("operator/*", False),
    ],
)
def test_a_workers_identity_must_match_its_certificate(uri: str, right: bool) -> None:
    identity = Identity.parse(f"spiffe://elasticps/train/{uri}")
    assert identity.covers(Role.WORKER, "w0", "ads") is right
    with pytest.raises(NotAuthorised, match="other/worker/ads/w0"):
        identity.require("other", Role.WORKER, "w0", "ads")


def test_each_role_may_look_and_does_its_own_work_only() -> None:
    identities = {role: Identity("c", role, "x", "a" * (role in OF_APPLICATIONS)) for role in Role}
    allowed = {role: {act for act in Act if identity.may(act)} for role, identity in identities.items()}
    assert all(Act.LOOK in acts for acts in allowed.values())
    own = {act: [role for role in Role if act in allowed[role]] for act in set(Act) - {Act.LOOK}}
    assert own == {
        Act.CHANGE: [Role.OPERATOR],
        Act.CUT: [Role.COORDINATOR, Role.OPERATOR],
        Act.TRAIN: [Role.WORKER],
        Act.READ: [Role.WORKER, Role.READER],
        Act.REPLICATE: [Role.SERVER],
        Act.LEAD: [Role.COORDINATOR],
    }


def test_a_common_name_fits_into_a_certificate() -> None:
    assert Identity("train", Role.SERVER, "s0").common_name == "server.train"
    assert len(Identity("c" * 63, Role.COORDINATOR, "x").common_name) == 64


@pytest.mark.parametrize("role", Role)
def test_clusters_with_long_names_have_common_names_of_their_own(role: Role) -> None:
    """etcd would take the one's processes for the other's."""
    app = "a" if role in OF_APPLICATIONS else ""
    names = {Identity("c" * 62 + last, role, "x", app).common_name for last in "ab"}
    assert len(names) == 2
    assert all(len(name) <= 64 for name in names)
