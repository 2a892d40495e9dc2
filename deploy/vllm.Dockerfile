# vLLM's image with the connector beside it. It brings nothing that vLLM does not have, so nothing of vLLM's changes.
# Build from the root of the sources:
#
#   docker build -f deploy/vllm.Dockerfile --build-arg VLLM_IMAGE=vllm/vllm-openai-cpu:latest -t vllm-kvserver .
ARG VLLM_IMAGE=vllm/vllm-openai-cpu:latest

# Built where it runs: the native module is for one minor version of Python, and for the C library that it was linked with.
FROM ${VLLM_IMAGE} AS build
# hadolint ignore=DL3002
USER root
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY csrc csrc
COPY kvserver kvserver
COPY adapters adapters
RUN python3 -m pip wheel --no-cache-dir --no-deps -w /wheels .

FROM ${VLLM_IMAGE}
USER root
# The user of the daemon: the socket is for its user only.
ARG UID=1000
COPY --from=build /wheels /tmp/wheels
# hadolint ignore=DL3013
RUN python3 -m pip install --no-cache-dir --no-deps --no-index --find-links /tmp/wheels kvserver \
    && rm -rf /tmp/wheels \
    && install -d -m 700 -o ${UID} -g ${UID} /run/kvserver \
    && install -d -m 700 -o ${UID} -g ${UID} /models
USER ${UID}
