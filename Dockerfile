# The CPU image: the pinned stack of requirements/cpu.txt and this checkout. By default it runs the quickstart. See docs/guides/docker.md.
#   docker build -t verl-retool .
#   docker run --rm --init --shm-size=2g -v "$PWD/outputs:/opt/verl-retool/outputs" verl-retool
# The wheels are for x86-64; on another processor Docker emulates one.
# hadolint ignore=DL3029
FROM --platform=linux/amd64 debian:bookworm-slim

# What scripts/setup_env.sh --check requires: Python 3.11 with venv, git, a compiler, and libnuma, which vLLM for CPUs links.
# Debian keeps no old versions to pin.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ gcc git libnuma1 python3.11 python3.11-venv \
    && rm -rf /var/lib/apt/lists/* \
    && git config --system --add safe.directory /opt/verl-retool

# The stack is in a layer that is rebuilt only if the lock, the installer or the package's first file changes.
WORKDIR /opt/verl-retool
ENV RETOOL_HARDWARE=cpu PIP_NO_CACHE_DIR=1
COPY scripts/setup_env.sh scripts/
COPY requirements requirements
COPY setup.py pyproject.toml README.md ./
COPY verl_ext/__init__.py verl_ext/
RUN bash scripts/setup_env.sh

COPY . .
# The container runs as root, so that the sandbox can give each program an id that owns nothing (docs/guides/docker.md).
CMD ["bash", "scripts/quickstart.sh"]
