"""Latencies counted in buckets of an eighth, and what rests on example prices.

Revision 0002. Both follow from the journal, so every quarter of usage is marked dirty: the rollup computes it anew.
Until it has, a quarter counts nothing in the histograms and nothing as an example.
"""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_FORGET = """
UPDATE usage_15m SET queue_histogram = '{}', ttft_histogram = '{}', tpot_histogram = '{}', total_histogram = '{}'
"""
_MARK = "INSERT INTO dirty_buckets SELECT DISTINCT 'usage', bucket FROM usage_15m"


def upgrade() -> None:
    op.execute("ALTER TABLE usage_15m ADD example_priced bigint NOT NULL DEFAULT 0")
    op.execute("ALTER TABLE usage_15m ADD example_price numeric NOT NULL DEFAULT 0")
    op.execute("ALTER TABLE usage_15m ALTER example_priced DROP DEFAULT, ALTER example_price DROP DEFAULT")
    op.execute(_FORGET)
    op.execute(_MARK)


def downgrade() -> None:
    op.execute("ALTER TABLE usage_15m DROP example_priced, DROP example_price")
    op.execute(_FORGET)
    op.execute(_MARK)
