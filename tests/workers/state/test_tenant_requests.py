"""The quota of a tenant's variables, over all of its live requests."""

from __future__ import annotations

from tokenbus.protocol.tenants import Tenant
from tokenbus.workers.state.tenant_requests import TenantRequests

ANN, BEN = Tenant("ann", 1_000), Tenant("ben", 1_000)


def test_the_variables_of_all_live_requests_of_a_tenant_count() -> None:
    sizes = {1: 400, 2: 400, 3: 900}
    requests = TenantRequests()

    def refusal(tenant: Tenant, request: int, cost: int = 100) -> str:
        return requests.refusal(tenant, request, cost, lambda r: sizes.get(r, 0)) or ""

    assert not refusal(ANN, 1)
    assert not refusal(ANN, 2)
    refused = refusal(ANN, 4, 300)
    assert "the quota variable_bytes of this key is used up" in refused
    assert "take 800 bytes, this operation up to 300, and it is 1000" in refused
    assert "in 1 s or later" in refused
    assert not refusal(BEN, 3)
    requests.end([1, 99])
    assert not refusal(ANN, 4, 300)


def test_a_tenant_without_a_quota_is_not_refused() -> None:
    assert TenantRequests().refusal(Tenant("ann"), 1, 10**9, lambda _: 0) is None


def test_a_tenant_is_sent_as_an_attachment() -> None:
    for tenant in (ANN, Tenant(), Tenant("ann")):
        assert Tenant.decode(tenant.encode()) == tenant
