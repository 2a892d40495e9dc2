# SGLang's image with the linker beside it. It brings nothing that SGLang does not have but a compiler: with any linker SGLang compiles
# the hash of its pages at its first start. Build from the root of the sources:
#
#   docker build -f deploy/sglang.Dockerfile --build-arg SGLANG_IMAGE=lmsysorg/sglang:v0.5.23 -t sglang-kvserver .
ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.23

# Built where it runs: the native module is for one minor version of Python, and for the C library that it was linked with.
FROM ${SGLANG_IMAGE} AS build
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

FROM ${SGLANG_IMAGE}
USER root
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ ninja-build libssl-dev \
    && rm -rf /var/lib/apt/lists/*
# The user of the daemon: the socket is for its user only.
ARG UID=1000
COPY --from=build /wheels /tmp/wheels
# hadolint ignore=DL3013
RUN python3 -m pip install --no-cache-dir --no-deps --no-index --find-links /tmp/wheels kvserver \
    && rm -rf /tmp/wheels \
    && install -d -m 700 -o ${UID} -g ${UID} /run/kvserver \
    && install -d -m 700 -o ${UID} -g ${UID} /models
USER ${UID}
