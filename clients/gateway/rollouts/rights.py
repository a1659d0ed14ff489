"""Decides whether an HTTP request comes from the operator.

If the gateway requires API keys, the API key must be the operator's. Such a key was made by
``tokenbus api-key NAME --operator``, or it belongs to a tenant whose CURVE key is the operator's.
If the gateway does not require API keys, the setting ``operator_over_http`` must be on, and the
request must not have the header ``Origin``, which browsers send for pages. Only this module uses
the gateway's bus clients for the operator (``Gateway.operator_client``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection

from starlette.requests import Request

from ....protocol.errors import Code, RequestError
from ....protocol.messages import Rollout
from ...operator import AsyncOperator
from ..context import gateway_of
from ..errors import ApiError
from ..users.turns import current_tenant

MAKE_KEY = "make an API key with 'tokenbus api-key NAME --operator'"


def operator_of(request: Request) -> AsyncOperator:
    """An object that makes the operator's calls for a request. Raises ApiError 403 if the request
    does not come from the operator. If the API key has a tenant, the broker checks the tenant's key
    when it receives the call."""
    gateway, tenant = gateway_of(request), current_tenant.get()
    if tenant is None and "api_key_name" in request.scope:
        if not request.scope["api_key_operator"]:
            raise _refused(f"this API key is not the operator's; {MAKE_KEY}")
    elif tenant is None and not gateway.settings.operator_over_http:
        raise _refused(f"set operator_over_http (tokenbus up --operator-over-http), or {MAKE_KEY}")
    elif tenant is None and "origin" in request.headers:
        raise _refused(f"a page must send the operator's API key; {MAKE_KEY}")
    return AsyncOperator(gateway.operator_client(tenant))


async def accepted(call: Awaitable[Rollout]) -> Rollout:
    """The result of an operator's call. Raises ApiError 403 if the broker refuses the call because
    the CURVE key with which it was made is not the operator's."""
    try:
        return await call
    except RequestError as error:
        if error.code != Code.NOT_ALLOWED:
            raise
        owner = "gateway" if current_tenant.get() is None else "API key"
        raise _refused(
            f"the {owner}'s key of the bus is not the operator's; name the operator's key with "
            "'tokenbus api-key NAME --tenant FILE'"
        ) from None


async def paused_models(request: Request) -> Collection[str]:
    """The models that are paused at the broker of the operator's session. Other brokers may not
    have paused these models. Any user may request the paused models."""
    client = gateway_of(request).operator_client(current_tenant.get())
    return (await client.status()).paused


def _refused(reason: str) -> ApiError:
    what = "only the operator may pause models and update weights"
    return ApiError(403, f"{what}: {reason}", code="not_allowed")
