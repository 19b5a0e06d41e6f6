# kvcellar as a server:
#     docker build -t kvcellar .
#     docker run -p 8642:8642 -v kvcellar:/data -e KVCELLAR_API_KEY=secret kvcellar serve smollm2 --host 0.0.0.0
# It has no torch, which models with a plan do not need (docs/models-and-formats.md). For all others
# --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu brings it; for GPUs of NVIDIA, whose libraries come with
# PyPI's torch, --build-arg TORCH_INDEX=https://pypi.org/simple, and docker run --gpus all ... --device cuda

FROM python:3.12-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN KVCELLAR_BUILD=strict pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim-bookworm
ARG TORCH_INDEX=
COPY --from=build /wheels /wheels
RUN if [ -n "$TORCH_INDEX" ]; then \
        pip install --no-cache-dir --index-url "$TORCH_INDEX" torch==2.13.0; \
    fi \
    && pip install --no-cache-dir "$(echo /wheels/*.whl)${TORCH_INDEX:+[torch]}" \
    && rm -r /wheels \
    && useradd --uid 1000 --create-home --home-dir /data kvcellar
USER 1000
# Agents, models and settings: all that has to outlive the container.
ENV KVCELLAR_HOME=/data/kvcellar HF_HOME=/data/huggingface
VOLUME /data
WORKDIR /data
EXPOSE 8642
HEALTHCHECK --start-period=5m CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8642/health')"]
# SIGTERM, which docker stop sends, saves all agents; it needs longer than docker's ten seconds only with a slow disk.
ENTRYPOINT ["kvcellar"]
CMD ["serve", "demo", "--host", "0.0.0.0"]
