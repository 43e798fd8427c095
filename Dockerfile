# The clone as an image, for `batchscout launch kuberay`: docker build -t REGISTRY/batchscout . && docker push REGISTRY/batchscout
# It holds what the directory holds, your own code and data too, less what .dockerignore leaves out.
FROM python:3.12-slim-bookworm

# torch.compile needs a compiler; KubeRay's probes on older operators need wget.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 scout

WORKDIR /batchscout
COPY --chown=scout . .
# Ray 2.60 and torch come with it; on a machine without GPUs: --build-arg INDEX=https://download.pytorch.org/whl/cpu
ARG INDEX=https://pypi.org/simple
RUN pip install --no-cache-dir --extra-index-url "$INDEX" -e . \
    && mkdir -p runs \
    && chown scout . runs
USER 1000
