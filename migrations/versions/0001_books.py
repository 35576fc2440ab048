"""The books: parties, rates, journal, buckets, deferred work.

Revision 0001. What each table and column means is said in ``billing/tables``.
"""

from __future__ import annotations

from datetime import UTC, datetime

from alembic import op

from billing.partitions import make_ahead

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

PARTIES = """
CREATE TABLE tenants (
    id          uuid PRIMARY KEY,
    name        text NOT NULL UNIQUE,
    rpm         integer,
    tpm         integer,
    concurrency integer,
    weight      double precision NOT NULL DEFAULT 1,
    created_at  timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT tenants_limits_check
        CHECK (coalesce(rpm, 1) > 0 AND coalesce(tpm, 1) > 0 AND coalesce(concurrency, 1) > 0),
    CONSTRAINT tenants_weight_check CHECK (weight > 0 AND weight < 'Infinity')
);

CREATE TABLE api_keys (
    id          uuid PRIMARY KEY,
    tenant_id   uuid REFERENCES tenants,
    name        text NOT NULL,
    prefix      text NOT NULL,
    secret_hash bytea NOT NULL UNIQUE,
    scopes      text[] NOT NULL,
    rpm         integer,
    tpm         integer,
    concurrency integer,
    created_at  timestamptz NOT NULL DEFAULT now(),
    expires_at  timestamptz,
    revoked_at  timestamptz,
    CONSTRAINT api_keys_limits_check
        CHECK (coalesce(rpm, 1) > 0 AND coalesce(tpm, 1) > 0 AND coalesce(concurrency, 1) > 0),
    CONSTRAINT api_keys_scopes_check CHECK (scopes <@ '{inference,admin}' AND cardinality(scopes) > 0),
    CONSTRAINT api_keys_owner_check CHECK (tenant_id IS NOT NULL OR scopes = '{admin}')
);
CREATE INDEX api_keys_tenant_id_idx ON api_keys (tenant_id);

CREATE TABLE login_tokens (
    token_hash bytea PRIMARY KEY,
    created_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    used_at    timestamptz
);

CREATE TABLE sessions (
    session_hash bytea PRIMARY KEY,
    api_key_id   uuid REFERENCES api_keys,
    created_at   timestamptz NOT NULL,
    expires_at   timestamptz NOT NULL,
    revoked_at   timestamptz
);

CREATE TABLE audit_log (
    id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at      timestamptz NOT NULL DEFAULT now(),
    actor   text NOT NULL,
    action  text NOT NULL,
    subject text NOT NULL,
    detail  jsonb NOT NULL
);
"""

RATES = """
CREATE TABLE prices (
    id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    model          text NOT NULL,
    tenant_id      uuid REFERENCES tenants,
    effective_from timestamptz NOT NULL,
    input          numeric NOT NULL,
    cached_input   numeric,
    output         numeric NOT NULL,
    request        numeric NOT NULL DEFAULT 0,
    device_second  numeric NOT NULL DEFAULT 0,
    currency       text NOT NULL,
    example        boolean NOT NULL DEFAULT false,
    created_at     timestamptz NOT NULL DEFAULT now(),
    UNIQUE NULLS NOT DISTINCT (model, tenant_id, effective_from),
    CONSTRAINT prices_amounts_check CHECK (
        coalesce(input >= 0 AND input < 1000000000 AND scale(input) <= 18, true)
        AND coalesce(cached_input >= 0 AND cached_input < 1000000000 AND scale(cached_input) <= 18, true)
        AND coalesce(output >= 0 AND output < 1000000000 AND scale(output) <= 18, true)
        AND coalesce(request >= 0 AND request < 1000000000 AND scale(request) <= 18, true)
        AND coalesce(device_second >= 0 AND device_second < 1000000000 AND scale(device_second) <= 18, true))
);

CREATE TABLE devices (
    name       text PRIMARY KEY,
    kind       text NOT NULL,
    owned_from timestamptz NOT NULL,
    owned_to   timestamptz
);

CREATE TABLE device_rates (
    id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    device_kind    text,
    device         text,
    hourly         numeric NOT NULL,
    currency       text NOT NULL,
    effective_from timestamptz NOT NULL,
    example        boolean NOT NULL DEFAULT false,
    created_at     timestamptz NOT NULL DEFAULT now(),
    UNIQUE NULLS NOT DISTINCT (device_kind, device, effective_from),
    CONSTRAINT device_rates_subject_check CHECK (num_nonnulls(device_kind, device) = 1),
    CONSTRAINT device_rates_hourly_check
        CHECK (coalesce(hourly >= 0 AND hourly < 1000000000 AND scale(hourly) <= 18, true))
);
CREATE INDEX device_rates_device_idx ON device_rates (device);
"""

JOURNAL = """
CREATE TABLE requests (
    id                uuid PRIMARY KEY,
    kind              text NOT NULL,
    tenant_id         uuid NOT NULL,
    api_key_id        uuid NOT NULL,
    model             text NOT NULL,
    route             text NOT NULL,
    arm               text NOT NULL,
    deployment_id     text NOT NULL,
    revision          text NOT NULL,
    endpoint          text NOT NULL,
    stream            boolean NOT NULL,
    status            text NOT NULL,
    finish_reason     text NOT NULL,
    error_code        text NOT NULL,
    prompt_tokens     integer NOT NULL,
    cached_tokens     integer NOT NULL,
    completion_tokens integer NOT NULL,
    generated_tokens  integer NOT NULL,
    delivered_tokens  integer NOT NULL,
    queue_seconds     numeric(20, 9),
    ttft_seconds      numeric(20, 9),
    tpot_seconds      numeric(20, 9),
    total_seconds     numeric(20, 9) NOT NULL,
    device_seconds    numeric(20, 9) NOT NULL DEFAULT 0,
    waste_seconds     numeric(20, 9) NOT NULL DEFAULT 0,
    price             numeric,
    cost              numeric,
    currency          text,
    price_id          bigint,
    cost_basis        text NOT NULL DEFAULT 'measured',
    attempts          integer NOT NULL DEFAULT 0,
    pending           boolean NOT NULL DEFAULT true,
    serving_attempt   integer,
    batch_id          uuid,
    trace_id          text NOT NULL,
    boot_id           text NOT NULL,
    boot_seq          integer,
    swept             boolean NOT NULL DEFAULT false,
    created_at        timestamptz NOT NULL,
    finished_at       timestamptz NOT NULL,
    CONSTRAINT requests_status_check CHECK (status IN ('completed', 'cancelled', 'failed')),
    CONSTRAINT requests_prompt_check CHECK (cached_tokens BETWEEN 0 AND prompt_tokens),
    CONSTRAINT requests_completion_check CHECK (
        delivered_tokens >= 0 AND generated_tokens >= 0 AND completion_tokens >= 0
        AND (completion_tokens = 0 OR delivered_tokens <= completion_tokens AND completion_tokens <= generated_tokens))
) PARTITION BY RANGE (id);
CREATE INDEX requests_finished_at_idx ON requests (finished_at);
CREATE INDEX requests_tenant_id_id_idx ON requests (tenant_id, id);

CREATE TABLE attempts (
    request_id        uuid,
    attempt           integer,
    worker            text NOT NULL,
    device            text NOT NULL,
    device_kind       text NOT NULL,
    outcome           text NOT NULL,
    error             text NOT NULL,
    prompt_tokens     integer NOT NULL,
    cached_tokens     integer NOT NULL,
    recomputed_tokens integer NOT NULL,
    generated_tokens  integer NOT NULL,
    drafted_tokens    integer NOT NULL,
    accepted_tokens   integer NOT NULL,
    received_at       timestamptz,
    finished_at       timestamptz NOT NULL,
    queue_ns          bigint NOT NULL,
    prefill_ns        bigint NOT NULL,
    decode_ns         bigint NOT NULL,
    used_ns           bigint NOT NULL,
    wasted_ns         bigint NOT NULL,
    waste             jsonb NOT NULL,
    kv_block_ns       bigint NOT NULL,
    steps             integer NOT NULL,
    preemptions       integer NOT NULL,
    peak_batch        integer NOT NULL,
    interval          integer,
    PRIMARY KEY (request_id, attempt),
    CONSTRAINT attempts_attempt_check CHECK (attempt > 0)
) PARTITION BY RANGE (request_id);
CREATE INDEX attempts_worker_interval_idx ON attempts (worker, interval);

CREATE TABLE device_intervals (
    worker             text,
    device             text,
    number             integer,
    device_kind        text NOT NULL,
    deployment_id      text NOT NULL,
    started_at         timestamptz NOT NULL,
    ended_at           timestamptz NOT NULL,
    start_ns           bigint NOT NULL,
    end_ns             bigint NOT NULL,
    busy_ns            bigint NOT NULL,
    idle_ns            bigint NOT NULL,
    loading_ns         bigint NOT NULL,
    waste_ns           bigint NOT NULL,
    overhead_ns        bigint NOT NULL,
    open_ns            bigint NOT NULL,
    prompt_tokens      bigint NOT NULL,
    recomputed_tokens  bigint NOT NULL,
    generated_tokens   bigint NOT NULL,
    drafted_tokens     bigint NOT NULL,
    steps              bigint NOT NULL,
    mixed_tenant_steps bigint NOT NULL,
    last               boolean NOT NULL,
    PRIMARY KEY (worker, device, number),
    CONSTRAINT device_intervals_span_check CHECK (end_ns >= start_ns)
);
CREATE INDEX device_intervals_ended_at_idx ON device_intervals (ended_at);

CREATE TABLE awaiting_settlement (
    request_id  uuid PRIMARY KEY,
    deadline    timestamptz NOT NULL,
    origin      jsonb NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE awaiting_report (
    request_id  uuid,
    attempt     integer,
    worker      text NOT NULL,
    device      text NOT NULL,
    device_kind text NOT NULL,
    device_ns   bigint NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (request_id, attempt)
);
"""

BUCKETS = """
CREATE TABLE dirty_buckets (
    rollup text NOT NULL,
    bucket timestamptz NOT NULL
);

CREATE TABLE usage_15m (
    bucket            timestamptz,
    tenant_id         uuid,
    api_key_id        uuid,
    model             text,
    deployment_id     text,
    arm               text,
    endpoint          text,
    stream            boolean,
    status            text,
    batch             boolean,
    cost_basis        text,
    requests          bigint NOT NULL,
    attempts          bigint NOT NULL,
    prompt_tokens     bigint NOT NULL,
    cached_tokens     bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    generated_tokens  bigint NOT NULL,
    delivered_tokens  bigint NOT NULL,
    price             numeric NOT NULL,
    cost              numeric NOT NULL,
    device_seconds    numeric(20, 9) NOT NULL,
    waste_seconds     numeric(20, 9) NOT NULL,
    unpriced          bigint NOT NULL,
    uncosted          bigint NOT NULL,
    pending           bigint NOT NULL,
    queue_histogram   bigint[] NOT NULL,
    ttft_histogram    bigint[] NOT NULL,
    tpot_histogram    bigint[] NOT NULL,
    total_histogram   bigint[] NOT NULL,
    PRIMARY KEY (bucket, tenant_id, api_key_id, model, deployment_id, arm, endpoint, stream, status, batch, cost_basis)
);

CREATE TABLE device_15m (
    bucket        timestamptz NOT NULL,
    device        text NOT NULL,
    device_kind   text NOT NULL,
    deployment_id text NOT NULL,
    rate_id       bigint,
    wall_ns       bigint NOT NULL,
    busy_ns       bigint NOT NULL,
    idle_ns       bigint NOT NULL,
    loading_ns    bigint NOT NULL,
    waste_ns      bigint NOT NULL,
    overhead_ns   bigint NOT NULL,
    CONSTRAINT device_15m_bucket_device_deployment_id_device_kind_rate_id_key
        UNIQUE NULLS NOT DISTINCT (bucket, device, deployment_id, device_kind, rate_id)
);

CREATE TABLE refusals_15m (
    bucket     timestamptz NOT NULL,
    tenant_id  uuid,
    api_key_id uuid,
    cause      text NOT NULL,
    refusals   bigint NOT NULL,
    UNIQUE NULLS NOT DISTINCT (bucket, tenant_id, api_key_id, cause)
);
CREATE INDEX refusals_15m_tenant_id_bucket_idx ON refusals_15m (tenant_id, bucket);
"""

DEFERRED = """
CREATE TABLE contents (
    id         uuid PRIMARY KEY,
    tenant_id  uuid NOT NULL REFERENCES tenants,
    sealed     bytea NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL
);
CREATE INDEX contents_expires_at_idx ON contents (expires_at);

CREATE TABLE batches (
    id           uuid PRIMARY KEY,
    tenant_id    uuid NOT NULL REFERENCES tenants,
    api_key_id   uuid NOT NULL REFERENCES api_keys,
    model        text NOT NULL,
    endpoint     text NOT NULL,
    total_lines  integer NOT NULL,
    open_lines   integer NOT NULL,
    created_at   timestamptz NOT NULL DEFAULT now(),
    expires_at   timestamptz NOT NULL,
    cancelled_at timestamptz,
    finished_at  timestamptz,
    CONSTRAINT batches_open_lines_check CHECK (open_lines BETWEEN 0 AND total_lines)
);
CREATE INDEX batches_tenant_id_id_idx ON batches (tenant_id, id);

CREATE TABLE batch_lines (
    batch_id       uuid REFERENCES batches,
    line           integer,
    custom_id      text NOT NULL,
    state          text NOT NULL,
    input_content  uuid NOT NULL,
    output_content uuid,
    request_id     uuid,
    claimed_by     text,
    error_code     text,
    claimed_until  timestamptz,
    finished_at    timestamptz,
    PRIMARY KEY (batch_id, line),
    CONSTRAINT batch_lines_state_check CHECK (state IN ('pending', 'running', 'done', 'failed', 'cancelled'))
);
CREATE INDEX batch_lines_batch_id_line_idx ON batch_lines (batch_id, line) WHERE state IN ('pending', 'running');
"""

APPEND_ONLY = """
CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'rows of % are only ever appended', TG_TABLE_NAME USING ERRCODE = 'restrict_violation';
END $$;
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON prices EXECUTE FUNCTION refuse_change();
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON device_rates EXECUTE FUNCTION refuse_change();
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_log EXECUTE FUNCTION refuse_change();
"""

TABLES = (
    "batch_lines, batches, contents, refusals_15m, device_15m, usage_15m, dirty_buckets, awaiting_report, "
    "awaiting_settlement, device_intervals, attempts, requests, device_rates, devices, prices, audit_log, sessions, "
    "login_tokens, api_keys, tenants"
)


def upgrade() -> None:
    for part in (PARTIES, RATES, JOURNAL, BUCKETS, DEFERRED, APPEND_ONLY):
        op.execute(part)
    make_ahead(op.get_bind(), datetime.now(UTC))


def downgrade() -> None:
    op.execute(f"DROP TABLE {TABLES}")
    op.execute("DROP FUNCTION refuse_change()")
