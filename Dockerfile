# syntax=docker/dockerfile:1
# Two images from one file: `app` (API, recorder, background work, dashboard; no torch) and `engine` (adds torch).

ARG PYTHON=3.11.14-slim-bookworm

# --- what the images install is put together in stages that never ship: no cache, no source tree in what runs ---
FROM python:${PYTHON} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONDONTWRITEBYTECODE=1
WORKDIR /src
RUN python -m venv /opt/pennyweight
ENV PATH=/opt/pennyweight/bin:$PATH
COPY pyproject.toml constraints.txt deploy/requirements.py ./
# The requirements alone first: a change in the code installs no package anew.
RUN --mount=type=cache,target=/root/.cache/pip \
    python requirements.py service dashboard > requirements.txt \
    && pip install -c constraints.txt -r requirements.txt

FROM build AS build-app
COPY . .
RUN pip install --no-cache-dir --no-deps .

FROM build AS build-engine
# CPU by default. Empty: the package index's own build, which on Linux x86-64 is the CUDA one.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=cache,target=/root/.cache/pip \
    python requirements.py engine > requirements.txt \
    && pip install -c constraints.txt --no-deps ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} torch \
    && pip install -c constraints.txt -r requirements.txt
COPY . .
RUN pip install --no-cache-dir --no-deps .

# --- what runs ---
FROM python:${PYTHON} AS base
ENV PATH=/opt/pennyweight/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PENNYWEIGHT_HOME=/var/lib/pennyweight
# The home is made here so that a named volume mounted on it belongs to the user, too.
RUN useradd --system --uid 10001 --user-group --home-dir /var/lib/pennyweight --shell /usr/sbin/nologin pennyweight \
    && install -d -o pennyweight -g pennyweight -m 0700 /var/lib/pennyweight
WORKDIR /var/lib/pennyweight
USER 10001:10001
CMD ["pennyweight", "--help"]

FROM base AS engine
COPY --from=build-engine /opt/pennyweight /opt/pennyweight

FROM base AS app
COPY --from=build-app /opt/pennyweight /opt/pennyweight
