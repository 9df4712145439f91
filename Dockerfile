# The same as `make setup`, in an image. Untested where no container engine is
# at hand; kept plain for that reason.
#
#   docker build -t tasuki .
#   docker run --rm -it --init -p 8000:8000 -v tasuki-cache:/cache tasuki
#   docker run --rm -it --init -v tasuki-cache:/cache tasuki demo

FROM rust:1-slim-bookworm AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/tasuki
COPY requirements.txt requirements-dev.txt ./
COPY tools ./tools
RUN python3 -m venv .venv \
    && tools/install_requirements.sh /opt/tasuki/.venv \
        -r requirements.txt -c requirements-dev.txt maturin
COPY . .
RUN mkdir -p .venv/.stamps && touch .venv/.stamps/venv .venv/.stamps/runtime \
    && make setup FEATURES=tls,otel \
    && rm -rf target

FROM debian:bookworm-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 ca-certificates \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/tasuki /opt/tasuki
ENV PATH=/opt/tasuki/.venv/bin:$PATH TASUKI_CACHE=/cache
VOLUME /cache
EXPOSE 8000 9090
ENTRYPOINT ["tasuki"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000", "--metrics-listen", "0.0.0.0:9090"]
