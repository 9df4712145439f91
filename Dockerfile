# Images. No container engine was at hand where this was written: the commands of each stage were
# run outside of one as far as docs/kubernetes.md says, the rest is read, not run.
#
#   docker build --target router      -t tasuki-router .        the router alone, 30 MB of program
#   docker build --target worker-cpu  -t tasuki-worker .        a worker for CPUs
#   docker build --target worker-cuda -t tasuki-worker-cuda .   a worker for NVIDIA GPUs
#   docker build                      -t tasuki .               all of it, `tasuki serve`
#
#   docker run --rm -it --init -p 8000:8000 -v tasuki-cache:/cache tasuki
#
# Workers write no bytecode and uv installs none: the build compiles it, so that no start has to.
# Bases are exact versions; give digests by --build-arg RUST=rust@sha256:... and so on.
ARG RUST=rust:1.89.0-slim-bookworm
ARG DEBIAN=debian:bookworm-20251117-slim
ARG CUDA=nvidia/cuda:13.0.2-devel-ubuntu24.04

# --- the router's program ---
FROM ${RUST} AS router-build
WORKDIR /opt/tasuki
COPY Cargo.toml Cargo.lock ./
COPY crates ./crates
COPY proto ./proto
RUN cargo build --release --locked -p tasuki-router --bin tasuki-router \
        --features tasuki-router/otel,tasuki-router/kubernetes \
    && mkdir -p /out && cp target/release/tasuki-router /out/ && rm -rf target

FROM ${DEBIAN} AS router
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin tasuki
COPY --from=router-build /out/tasuki-router /usr/local/bin/tasuki-router
USER 10001:10001
EXPOSE 8000 9090
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/8000 && printf 'GET /live HTTP/1.0\\r\\n\\r\\n' >&3 && grep -q '200 OK' <&3"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["tasuki-router"]
CMD ["--help"]

# --- the package, for Python as Debian has it ---
FROM ${RUST} AS package-debian
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/tasuki
COPY requirements.txt requirements-dev.txt ./
COPY tools ./tools
RUN python3 -m venv .venv \
    && UV_COMPILE_BYTECODE=1 tools/install_requirements.sh /opt/tasuki/.venv \
        -r requirements.txt -c requirements-dev.txt maturin
COPY . .
RUN mkdir -p .venv/.stamps && touch .venv/.stamps/venv .venv/.stamps/runtime \
    && make setup FEATURES=tls,otel,kubernetes \
    && .venv/bin/python -m compileall -q python \
    && rm -rf target

FROM ${DEBIAN} AS worker-cpu
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --home-dir /cache --shell /usr/sbin/nologin tasuki \
    && mkdir -p /cache && chown 10001:10001 /cache
COPY --from=package-debian /opt/tasuki /opt/tasuki
ENV PATH=/opt/tasuki/.venv/bin:$PATH \
    HOME=/cache TASUKI_CACHE=/cache/tasuki HF_HOME=/cache/huggingface \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
VOLUME /cache
EXPOSE 7001
# A model may load for long; a worker that drains is not healthy, and is not to be killed for it.
HEALTHCHECK --interval=20s --timeout=10s --start-period=1h --retries=6 \
    CMD ["python", "-m", "tasuki.worker.health", "127.0.0.1:7001"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["tasuki"]
CMD ["worker", "--model", "/model", "--host", "0.0.0.0", "--port", "7001"]

# --- the package, for Python as the CUDA image has it ---
FROM ${CUDA} AS package-cuda
COPY --from=router-build /usr/local/cargo /usr/local/cargo
COPY --from=router-build /usr/local/rustup /usr/local/rustup
ENV PATH=/usr/local/cargo/bin:$PATH CARGO_HOME=/usr/local/cargo RUSTUP_HOME=/usr/local/rustup
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv make gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/tasuki
COPY requirements.txt requirements-dev.txt requirements-gpu.txt ./
COPY tools ./tools
RUN python3 -m venv .venv \
    && UV_COMPILE_BYTECODE=1 tools/install_requirements.sh /opt/tasuki/.venv \
        -r requirements-gpu.txt -c requirements-dev.txt maturin
COPY . .
RUN mkdir -p .venv/.stamps \
    && touch .venv/.stamps/venv .venv/.stamps/runtime .venv/.stamps/gpu \
    && make setup FEATURES=tls,otel,kubernetes \
    && .venv/bin/python -m compileall -q python \
    && rm -rf target

# The toolkit's nvcc and a C compiler stay: FlashInfer and Triton compile kernels at the first start.
FROM ${CUDA} AS worker-cuda
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev gcc libc6-dev ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --home-dir /cache --shell /usr/sbin/nologin tasuki \
    && mkdir -p /cache && chown 10001:10001 /cache
COPY --from=package-cuda /opt/tasuki /opt/tasuki
ENV PATH=/opt/tasuki/.venv/bin:$PATH \
    HOME=/cache TASUKI_CACHE=/cache/tasuki HF_HOME=/cache/huggingface \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
VOLUME /cache
EXPOSE 7001
HEALTHCHECK --interval=20s --timeout=10s --start-period=1h --retries=6 \
    CMD ["python", "-m", "tasuki.worker.health", "127.0.0.1:7001"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["tasuki"]
CMD ["worker", "--model", "/model", "--host", "0.0.0.0", "--port", "7001"]

# --- everything, on CPUs: one command ---
FROM worker-cpu AS serve
EXPOSE 8000 9090
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m \
    CMD ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/8000 && printf 'GET /live HTTP/1.0\\r\\n\\r\\n' >&3 && grep -q '200 OK' <&3"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000", "--metrics-listen", "0.0.0.0:9090"]
