"""The price and the rate in force, as SQL to join with: one rule each, used wherever money is computed."""

from __future__ import annotations


def rate_in_force(device: str, device_kind: str, moment: str) -> str:
    """A LATERAL subquery of ``device_rates``: the device's own rate before its kind's, the latest not after ``moment``.

    The arguments are SQL expressions.
    """
    return (
        "(SELECT d.* FROM device_rates d "
        f"WHERE (d.device = {device} OR d.device_kind = {device_kind}) AND d.effective_from <= {moment} "
        "ORDER BY d.device NULLS LAST, d.effective_from DESC LIMIT 1)"
    )


def price_in_force(model: str, tenant_id: str, moment: str) -> str:
    """A condition on rows of ``prices p``; the right one comes first in PRICE_ORDER."""
    return (
        f"(p.model = {model} AND (p.tenant_id = {tenant_id} OR p.tenant_id IS NULL) AND p.effective_from <= {moment})"
    )


PRICE_ORDER = "p.tenant_id NULLS LAST, p.effective_from DESC"
