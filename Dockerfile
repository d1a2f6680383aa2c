# sonoro serve in a container: `docker build --target cpu .` or `--target cuda .`. Versions are those of constraints.txt.
# Nothing of a model is in the image: the built-in voice comes with the package, others are loaded from a folder or hub.

FROM python:3.11-slim-bookworm AS wheel
WORKDIR /src
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 HF_HOME=/cache/hub TRITON_CACHE_DIR=/cache/kernels
RUN useradd --create-home --uid 10001 sonoro \
    && install --directory --owner=sonoro --group=sonoro /cache /cache/hub /cache/kernels /voices
WORKDIR /home/sonoro
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s --start-interval=1s \
    CMD ["python", "-c", "import urllib.request as http; http.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["sonoro"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]

FROM base AS cpu
# From torch's own index, because the build of PyPI brings the libraries of CUDA along.
RUN --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    torch="$(sed -n 's/^torch==//p' /constraints.txt)" \
    && pip install --no-cache-dir --constraint /constraints.txt \
        --extra-index-url https://download.pytorch.org/whl/cpu "torch==${torch}+cpu" /wheels/*.whl
USER 10001

FROM base AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Triton compiles what calls its kernels with a C compiler, at the first start.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --constraint /constraints.txt /wheels/*.whl
USER 10001
# Kernels for the models that it will serve, as in --build-arg MODELS="fish-s2-pro voxcpm2": then a start compiles none.
# Names, card and slots must be those of the server; a volume on /cache begins with what is here.
ARG MODELS=""
ARG CARD="NVIDIA H200"
ARG SLOTS=16
RUN for model in $MODELS; do sonoro compile "$model" --device-name "$CARD" --slots "$SLOTS" || exit 1; done

# For Ray's clusters, whose nodes start Ray themselves; KubeRay asks for their health by wget.
FROM cuda AS ray
USER root
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends wget \
    && rm -rf /var/lib/apt/lists/*
RUN --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --constraint /constraints.txt "$(echo /wheels/*.whl)[scale]"
USER 10001
HEALTHCHECK NONE
ENTRYPOINT []
CMD ["bash"]
